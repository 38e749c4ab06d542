// Whole draft trees in one call: depth by depth, each row's best columns become its children. A tree
// is given, or it grows: the rows of a depth are then chosen by what the depths above have shown.
#include "engine.h"
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

namespace entmtp {
namespace {

bool is_below(const int32_t* values, int64_t count, int32_t from, int32_t to) {
    return values && std::all_of(values, values + count, [&](int32_t v) { return v >= from && v < to; });
}

bool is_sound(const Engine& e, const EntmtpTree& t, int max_levels, bool is_block) {
    if (t.num_nodes < 1 || t.num_levels < 1 || t.num_levels > max_levels || !t.tokens || !t.levels) return false;
    int held = 0;
    for (int d = 0; d < t.num_levels; d++) {
        const EntmtpLevel& l = t.levels[d];
        if (l.rows < 1 || l.rows > t.num_nodes || l.children < 1 || l.children > t.num_nodes || (!d && l.rows != 1)) return false;
        if (l.width < 1 || l.width > std::min<int>(kMaxBest, e.vocabulary.columns)) return false;
        if (!is_below(l.paths, int64_t(l.rows) * (d + 1), 0, t.num_nodes) || !is_below(l.nodes, l.children, 1, t.num_nodes)) return false;
        if (!is_below(l.parents, l.children, 0, l.rows) || !is_below(l.ranks, l.children, 0, l.width)) return false;
        if (is_block && d && (!l.mask || !is_below(l.above, l.rows, 0, t.levels[d - 1].rows))) return false;
        if (d) held += l.rows;
    }
    return held <= kMaxPending;
}

// Each node of an envelope is a child once, rows have children, and paths go through the rows that
// nodes are children of; all else as in a tree.
bool is_sound(const Engine& e, const EntmtpGrowth& g, int max_levels) {
    if (g.num_nodes > kMaxEnvelope || !g.table || !g.rows_ms || !g.draft_ms || !g.draft_row_ms || !g.gains || !g.codes || !g.kept) return false;
    if (g.num_copied < 0 || g.num_copied > kMaxCopy || (g.num_copied && (!g.copied || !g.hits || !g.mixes))) return false;
    if (!is_sound(e, EntmtpTree{g.num_nodes, g.num_levels, g.levels, g.tokens, g.noise, g.scale}, max_levels, false)) return false;
    std::vector<int> above(g.num_nodes, -1);
    for (int d = 0; d < g.num_levels; d++) {
        const EntmtpLevel& l = g.levels[d];
        for (int r = 0; r < l.rows; r++) {
            const int32_t* path = l.paths + size_t(r) * (d + 1);
            for (int t = 0; t <= d; t++) if (t ? above[path[t]] != path[t - 1] : path[0] != 0) return false;
        }
        std::vector<bool> has_child(l.rows, false);
        for (int c = 0; c < l.children; c++) {
            if (above[l.nodes[c]] >= 0) return false;
            above[l.nodes[c]] = l.paths[size_t(l.parents[c]) * (d + 1) + d], has_child[l.parents[c]] = true;
        }
        if (std::count(has_child.begin(), has_child.end(), false)) return false;
    }
    return true;
}

// The rows of one depth of all trees, and what comes of them.
struct Depth {
    int depth, width = 0, rows = 0;
    bool has_noise = false;
    std::vector<const EntmtpTree*> trees;
    std::vector<int> rows_of;
    std::vector<int32_t> tree_of, tokens, best;
    std::vector<float> values, scale, log_sums;
    std::vector<const float*> noise;

    // Rows of a head that reads no tokens serve all nodes of their depth: one a tree.
    Depth(const EntmtpTree* from, int count, int d, bool is_shared, bool is_growing) : depth(d) {
        for (int i = 0; i < count; i++) {
            const EntmtpTree& t = from[i];
            if (t.num_levels <= d) continue;
            int own = is_shared ? 1 : t.levels[d].rows;
            trees.push_back(&t), rows_of.push_back(own);
            rows += own, width = std::max(width, t.levels[d].width);
            has_noise |= t.noise != nullptr;
            tree_of.insert(tree_of.end(), own, i);
            noise.insert(noise.end(), own, t.noise ? t.noise[d] : nullptr), scale.insert(scale.end(), own, t.scale);
        }
        best.resize(size_t(rows) * width), values.resize(best.size());
        if (is_growing) log_sums.resize(rows);
    }
    const EntmtpLevel& level(size_t i) const { return trees[i]->levels[depth]; }
    // Tokens of the last `count` nodes of every row's path.
    void gather(int count) {
        for (size_t i = 0; i < trees.size(); i++)
            for (int r = 0; r < rows_of[i]; r++)
                for (int at = depth + 1 - count; at <= depth; at++)
                    tokens.push_back(trees[i]->tokens[level(i).paths[size_t(r) * (depth + 1) + at]]);
    }
    Ranking ranking() {
        return {nullptr, width, best.data(), values.data(), has_noise ? noise.data() : nullptr, has_noise ? scale.data() : nullptr,
                log_sums.empty() ? nullptr : log_sums.data()};
    }
    // For each child: its tree's number in the batch, its number in the level, its row, its column's place.
    template <class Visit> void each_child(bool is_shared, Visit visit) const {
        size_t first = 0;
        for (size_t i = 0; i < trees.size(); first += rows_of[i++])
            for (int c = 0; c < level(i).children; c++) {
                size_t row = first + (is_shared ? 0 : level(i).parents[c]);
                visit(i, c, row, row * width + level(i).ranks[c]);
            }
    }
    void place(const Vocabulary& v, bool is_shared) const {
        each_child(is_shared, [&](size_t i, int c, size_t, size_t at) { trees[i]->tokens[level(i).nodes[c]] = v.hot_ids[best[at]]; });
    }
};

// One tree while it grows; its slow twin is Grower of growth.py.
class Growing {
public:
    explicit Growing(EntmtpGrowth& g)
        : g_(g), values_(g.num_nodes + g.num_copied, -1.0), on_copy_(g.num_nodes, -1), held_row_(g.num_nodes, -1) {
        arrays_.reserve(g.num_levels), levels_.reserve(g.num_levels);
        values_[0] = 1.0, on_copy_[0] = 0, g.num_kept = 0, g.attach = 0;
        view = {g.num_nodes, 0, levels_.data(), g.tokens, g.noise, g.scale};
    }
    EntmtpTree view;

    // Chooses the rows of a depth that are worth being scored; the caller has chosen the root.
    bool open(int depth, bool is_block) {
        if (view.num_levels < depth || depth >= g_.num_levels) return false;
        const EntmtpLevel& all = g_.levels[depth];
        std::vector<int> rows;
        double further = g_.rate * g_.draft_row_ms[depth], surplus = 0;
        for (int r = 0; r < all.rows; r++) {
            int node = node_of(all, depth, r), at = on_copy_[node];
            if (values_[node] < 0) continue;
            double left = at < 0 || at >= g_.num_copied ? 1.0 : 1.0 - g_.hits[at];
            double margin = values_[node] * left * g_.gains[depth] - further;
            if (margin > 0) rows.push_back(r), surplus += margin;
        }
        if (!depth) rows = {0};
        else if (rows.empty() || !(surplus > g_.rate * g_.draft_ms[depth] - further)) return false;
        make_level(all, depth, rows, is_block);
        return true;
    }
    // The value of a child whose row's scores have come out.
    void take(int node, int parent, float score, float log_sum) {
        float code = std::floor((log_sum - score) * kCodesPerNat);
        int at = code < 0 ? 0 : code < kCodes ? int(code) : kCodes - 1;
        g_.codes[node] = static_cast<uint8_t>(at);
        double share = g_.table[size_t(node - 1) * kCodes + at];
        int copy = on_copy_[parent];
        if (copy >= 0 && copy < g_.num_copied) {
            share = share * (1 - g_.mixes[copy]);
            if (g_.tokens[node] == g_.copied[copy]) share = share + g_.mixes[copy], on_copy_[node] = copy + 1;
            if (copy == num_asked_) num_asked_++;
        }
        values_[node] = values_[parent] * share;
    }
    void keep() {
        add_copy();
        int count = 0;
        for (size_t n = 1; n < values_.size(); n++) if (values_[n] >= 0) g_.kept[count++] = static_cast<int>(n);
        std::stable_sort(g_.kept, g_.kept + count, [&](int a, int b) { return values_[a] > values_[b]; });
        double best = -g_.rate * g_.rows_ms[0], tokens = 0;
        for (int n = 0; n < count; n++) {
            tokens += values_[g_.kept[n]];
            double worth = tokens - g_.rate * g_.rows_ms[n + 1];
            if (worth > best) best = worth, g_.num_kept = n + 1;
        }
    }

private:
    // Values the tokens of the copy that no node stands for.
    void add_copy() {
        for (int n = 1; n < g_.num_nodes; n++) if (on_copy_[n] > on_copy_[g_.attach]) g_.attach = n;
        double value = values_[g_.attach];
        int first = on_copy_[g_.attach];
        for (int at = first; at < g_.num_copied; at++) {
            value = value * (at == first && first < num_asked_ ? g_.mixes[at] : g_.hits[at]);
            values_[g_.num_nodes + at] = value;
        }
    }

    struct Arrays { std::vector<int32_t> paths, nodes, parents, ranks, above; std::vector<uint8_t> mask; };

    static int node_of(const EntmtpLevel& all, int depth, int row) { return all.paths[size_t(row) * (depth + 1) + depth]; }

    void make_level(const EntmtpLevel& all, int depth, const std::vector<int>& rows, bool is_block) {
        Arrays& a = arrays_.emplace_back();
        std::vector<int> place(all.rows, -1);
        int width = 0;
        for (int r : rows) {
            place[r] = static_cast<int>(a.paths.size()) / (depth + 1);
            const int32_t* path = all.paths + size_t(r) * (depth + 1);
            a.paths.insert(a.paths.end(), path, path + depth + 1);
        }
        for (int c = 0; c < all.children; c++) {
            if (place[all.parents[c]] < 0) continue;
            a.nodes.push_back(all.nodes[c]), a.parents.push_back(place[all.parents[c]]), a.ranks.push_back(all.ranks[c]);
            width = std::max(width, all.ranks[c] + 1);
        }
        int own = static_cast<int>(rows.size());
        if (is_block && depth) hold(a, depth, own);
        levels_.push_back({own, static_cast<int32_t>(a.nodes.size()), width, a.paths.data(), a.nodes.data(), a.parents.data(), a.ranks.data(), a.above.data(), a.mask.data()});
        view.levels = levels_.data(), view.num_levels = depth + 1;
    }
    // Rows that a block holds: where the row above each lies, and which of the held each sees.
    void hold(Arrays& a, int depth, int own) {
        const EntmtpLevel& before = levels_.back();
        for (int r = 0; r < own; r++) {
            const int32_t* path = a.paths.data() + size_t(r) * (depth + 1);
            held_row_[path[depth]] = num_held_++;
            int above = 0;
            while (depth > 1 && node_of(before, depth - 1, above) != path[depth - 1]) above++;
            a.above.push_back(above);
        }
        a.mask.assign(size_t(own) * num_held_, 0);
        for (int r = 0; r < own; r++)
            for (int t = 1; t <= depth; t++) a.mask[size_t(r) * num_held_ + held_row_[a.paths[size_t(r) * (depth + 1) + t]]] = 1;
    }

    EntmtpGrowth& g_;
    std::vector<double> values_;       // of scored nodes and of the copy's own; -1 elsewhere
    std::vector<int> on_copy_;         // tokens of the copy down to a node; -1 where it left it
    int num_asked_ = 0;                // tokens of the copy whose rows were scored
    std::vector<int32_t> held_row_;
    int num_held_ = 0;
    std::vector<Arrays> arrays_;
    std::vector<EntmtpLevel> levels_;
};

// The trees of a call, which are given or grow.
struct Batch {
    std::vector<EntmtpTree> trees;
    std::vector<std::unique_ptr<Growing>> growing;
    bool is_block;

    Batch(const EntmtpTree* from, int count, bool block) : trees(from, from + count), is_block(block) {}
    Batch(EntmtpGrowth* from, int count, bool block) : trees(count), is_block(block) {
        for (int i = 0; i < count; i++) growing.push_back(std::make_unique<Growing>(from[i])), trees[i] = growing[i]->view;
    }
    int count() const { return static_cast<int>(trees.size()); }
    // Whether any tree has rows at a depth.
    bool open(int depth) {
        bool is_open = false;
        for (int i = 0; i < count(); i++) {
            if (!growing.empty() && growing[i]->open(depth, is_block)) trees[i] = growing[i]->view;
            is_open |= trees[i].num_levels > depth;
        }
        return is_open;
    }
    Depth rows(int depth, bool is_shared) const { return Depth(trees.data(), count(), depth, is_shared, !growing.empty()); }
    void take(const Vocabulary& v, const Depth& d, bool is_shared) {
        d.place(v, is_shared);
        if (growing.empty()) return;
        d.each_child(is_shared, [&](size_t i, int c, size_t row, size_t at) {
            const EntmtpLevel& l = d.level(i);
            int parent = l.paths[size_t(l.parents[c]) * (d.depth + 1) + d.depth];
            growing[d.tree_of[row]]->take(l.nodes[c], parent, d.values[at], d.log_sums[row]);
        });
    }
    void finish() { for (auto& g : growing) g->keep(); }
};

int run_rows(Engine& e, Depth& d, const std::vector<Segment>& segments, const std::vector<int32_t>& positions, const std::vector<int32_t>& wanted) {
    Job job{};
    job.tokens = d.tokens.data(), job.positions = positions.data(), job.num_rows = static_cast<int>(positions.size());
    job.segments = segments.data(), job.num_segments = static_cast<int>(segments.size());
    e.features.resize(positions.size() * e.c.hidden);
    job.hidden = e.features.data(), job.inputs = e.inputs.data();
    job.logit_rows = wanted.data(), job.num_logit_rows = static_cast<int>(wanted.size());
    job.ranking = d.ranking();
    return entmtp_forward(&e, &job);
}

// What waits of each text; the feature of its last row is that of the root.
int read_texts(Engine& e, Depth& d, const EntmtpText* texts, int count) {
    std::vector<Segment> segments;
    std::vector<int32_t> positions, wanted;
    const size_t size = e.c.hidden;
    e.inputs.clear();
    for (int i = 0; i < count; i++) {
        const EntmtpText& t = texts[i];
        segments.push_back({t.cache, static_cast<int32_t>(positions.size()), t.num_rows, nullptr, nullptr, 0});
        for (int r = 0; r < t.num_rows; r++) positions.push_back(t.cache->length + r);
        wanted.push_back(static_cast<int32_t>(positions.size()) - 1);
        e.inputs.insert(e.inputs.end(), t.inputs, t.inputs + t.num_rows * size);
        d.tokens.insert(d.tokens.end(), t.tokens, t.tokens + t.num_rows);
    }
    if (int error = run_rows(e, d, segments, positions, wanted)) return error;
    for (int i = 0; i < count; i++) {
        std::vector<int32_t> all(texts[i].num_rows);
        std::iota(all.begin(), all.end(), 0);
        if (entmtp_cache_commit(&e, texts[i].cache, all.data(), texts[i].num_rows)) return 4;
        memmove(e.features.data() + i * size, e.features.data() + wanted[i] * size, size * sizeof(float));
    }
    return 0;
}

// The nodes of a depth below the root, held behind those of the depths before.
int read_level(Engine& e, Depth& d, const EntmtpText* texts, const std::vector<int>& before, std::vector<std::vector<int32_t>>& held) {
    std::vector<Segment> segments;
    std::vector<int32_t> positions, wanted(d.rows);
    const size_t size = e.c.hidden;
    e.inputs.resize(d.rows * size);
    std::iota(wanted.begin(), wanted.end(), 0);
    size_t row = 0;
    for (size_t i = 0; i < d.trees.size(); i++) {
        int tree = d.tree_of[row], length = texts[tree].cache->length;
        const auto& own = held[tree];
        segments.push_back({texts[tree].cache, static_cast<int32_t>(row), d.rows_of[i], d.level(i).mask, own.data(), static_cast<int32_t>(own.size())});
        for (int r = 0; r < d.rows_of[i]; r++, row++) {
            positions.push_back(length + d.depth - 1);
            memcpy(e.inputs.data() + row * size, e.features.data() + size_t(before[tree] + d.level(i).above[r]) * size, size * sizeof(float));
        }
    }
    d.gather(1);
    int error = run_rows(e, d, segments, positions, wanted);
    for (size_t r = 0; r < positions.size(); r++) held[d.tree_of[r]].push_back(positions[r]);
    return error;
}

int fill_block(Engine& e, const EntmtpText* texts, Batch& batch) {
    std::vector<std::vector<int32_t>> held(batch.count());
    std::vector<int> before(batch.count());  // first row of each tree among the features
    for (int depth = 0; batch.open(depth); depth++) {
        Depth d = batch.rows(depth, false);
        if (int error = depth ? read_level(e, d, texts, before, held) : read_texts(e, d, texts, batch.count())) return error;
        batch.take(e.vocabulary, d, false);
        for (int r = d.rows - 1; r >= 0; r--) before[d.tree_of[r]] = r;
    }
    batch.finish();
    return 0;
}

int fill_by_heads(Engine& e, const float* base, Batch& batch) {
    for (int depth = 0; batch.open(depth); depth++) {
        bool reads_tokens = e.head_list[depth].first.matrix.panels;
        Depth d = batch.rows(depth, !reads_tokens);
        if (reads_tokens) d.gather(depth + 1);
        HeadJob job{depth, d.rows, batch.count(), base, d.tree_of.data(), d.tokens.data(), d.ranking()};
        if (int error = entmtp_heads_run(&e, &job)) return error;
        batch.take(e.vocabulary, d, !reads_tokens);
    }
    batch.finish();
    return 0;
}

int check_texts(const EntmtpText* texts, int count) {
    for (int i = 0; i < count; i++) {
        const EntmtpText& t = texts[i];
        if (!t.cache || t.num_rows < 1 || !t.inputs || !t.tokens) return 2;
        if (t.num_rows > t.cache->capacity - t.cache->length) return 4;
    }
    return 0;
}

// Where it fails, the caches are as before.
template <class Trees> int read_and_fill(Engine& e, const EntmtpText* texts, Trees* trees, int count) {
    int code = -1;
    std::vector<int32_t> lengths;
    try {
        for (int i = 0; i < count; i++) lengths.push_back(texts[i].cache->length);
        Batch batch(trees, count, true);
        code = fill_block(e, texts, batch);
    } catch (const std::bad_alloc&) {}
    for (size_t i = 0; code && i < lengths.size(); i++) texts[i].cache->length = lengths[i];
    return code;
}

} // namespace
} // namespace entmtp

using namespace entmtp;

extern "C" {

// Fills trees by heads; tree i begins with row i of `base`.
int entmtp_heads_fill(Engine* e, const float* base, const EntmtpTree* trees, int count) try {
    if (count < 1 || !base || !trees) return 2;
    for (int i = 0; i < count; i++)
        if (!is_sound(*e, trees[i], static_cast<int>(e->head_list.size()), false)) return 11;
    Batch batch(trees, count, false);
    return fill_by_heads(*e, base, batch);
} catch (const std::bad_alloc&) { return -1; }

// Grows trees by heads.
int entmtp_heads_grow(Engine* e, const float* base, EntmtpGrowth* trees, int count) try {
    if (count < 1 || !base || !trees) return 2;
    for (int i = 0; i < count; i++)
        if (!is_sound(*e, trees[i], static_cast<int>(e->head_list.size()))) return 11;
    Batch batch(trees, count, false);
    return fill_by_heads(*e, base, batch);
} catch (const std::bad_alloc&) { return -1; }

// Reads what waits of each text, commits it, and fills its tree by a block. A text has room for its
// rows and its tree's; where something fails, the caches are as before.
int entmtp_block_fill(Engine* e, const EntmtpText* texts, const EntmtpTree* trees, int count) {
    if (count < 1 || !texts || !trees || !e->front.join.panels) return 2;
    for (int i = 0; i < count; i++)
        if (!is_sound(*e, trees[i], kMaxPending, true)) return 11;
    if (int error = check_texts(texts, count)) return error;
    return read_and_fill(*e, texts, trees, count);
}

// The same for trees that grow; a text has room for all rows of its envelope.
int entmtp_block_grow(Engine* e, const EntmtpText* texts, EntmtpGrowth* trees, int count) try {
    if (count < 1 || !texts || !trees || !e->front.join.panels) return 2;
    for (int i = 0; i < count; i++)
        if (!is_sound(*e, trees[i], kMaxPending)) return 11;
    if (int error = check_texts(texts, count)) return error;
    return read_and_fill(*e, texts, trees, count);
} catch (const std::bad_alloc&) { return -1; }

} // extern "C"
