// Whole draft trees in one call: depth by depth, each row's best columns become its children.
#include "engine.h"
#include <algorithm>
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

// The rows of one depth of all trees, and what comes of them.
struct Depth {
    int depth, width = 0, rows = 0;
    bool has_noise = false;
    std::vector<const EntmtpTree*> trees;
    std::vector<int> rows_of;
    std::vector<int32_t> tree_of, tokens, best;
    std::vector<float> values, scale;
    std::vector<const float*> noise;

    // Rows of a head that reads no tokens serve all nodes of their depth: one a tree.
    Depth(const EntmtpTree* from, int count, int d, bool is_shared) : depth(d) {
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
        return {nullptr, width, best.data(), values.data(), has_noise ? noise.data() : nullptr, has_noise ? scale.data() : nullptr};
    }
    void place(const Vocabulary& v, bool is_shared) const {
        size_t first = 0;
        for (size_t i = 0; i < trees.size(); first += rows_of[i++])
            for (int c = 0; c < level(i).children; c++) {
                size_t row = first + (is_shared ? 0 : level(i).parents[c]);
                trees[i]->tokens[level(i).nodes[c]] = v.hot_ids[best[row * width + level(i).ranks[c]]];
            }
    }
};

int max_levels(const EntmtpTree* trees, int count) {
    int most = 0;
    for (int i = 0; i < count; i++) most = std::max(most, trees[i].num_levels);
    return most;
}

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

int fill_block(Engine& e, const EntmtpText* texts, const EntmtpTree* trees, int count) {
    std::vector<std::vector<int32_t>> held(count);
    std::vector<int> before(count);  // first row of each tree among the features
    for (int depth = 0, most = max_levels(trees, count); depth < most; depth++) {
        Depth d(trees, count, depth, false);
        if (int error = depth ? read_level(e, d, texts, before, held) : read_texts(e, d, texts, count)) return error;
        d.place(e.vocabulary, false);
        for (int r = d.rows - 1; r >= 0; r--) before[d.tree_of[r]] = r;
    }
    return 0;
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
    for (int depth = 0, most = max_levels(trees, count); depth < most; depth++) {
        bool reads_tokens = e->head_list[depth].first.matrix.panels;
        Depth d(trees, count, depth, !reads_tokens);
        if (reads_tokens) d.gather(depth + 1);
        HeadJob job{depth, d.rows, count, base, d.tree_of.data(), d.tokens.data(), d.ranking()};
        if (int error = entmtp_heads_run(e, &job)) return error;
        d.place(e->vocabulary, !reads_tokens);
    }
    return 0;
} catch (const std::bad_alloc&) { return -1; }

// Reads what waits of each text, commits it, and fills its tree by a block. A text has room for its
// rows and its tree's; where something fails, the caches are as before.
int entmtp_block_fill(Engine* e, const EntmtpText* texts, const EntmtpTree* trees, int count) {
    if (count < 1 || !texts || !trees || !e->front.join.panels) return 2;
    for (int i = 0; i < count; i++) {
        if (!is_sound(*e, trees[i], kMaxPending, true)) return 11;
        const EntmtpText& t = texts[i];
        if (!t.cache || t.num_rows < 1 || !t.inputs || !t.tokens) return 2;
        if (t.num_rows > t.cache->capacity - t.cache->length) return 4;
    }
    int code = -1;
    std::vector<int32_t> lengths;
    try {
        for (int i = 0; i < count; i++) lengths.push_back(texts[i].cache->length);
        code = fill_block(*e, texts, trees, count);
    } catch (const std::bad_alloc&) {}
    for (size_t i = 0; code && i < lengths.size(); i++) texts[i].cache->length = lengths[i];
    return code;
}

} // extern "C"
