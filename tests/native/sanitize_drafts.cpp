// The part of the C interface that drafters use, to be compiled with sanitizers: heads, and blocks
// whose trees are held depth by depth. Every row is compared, bit for bit, with the same row alone
// on one thread, where tokens are committed one by one. Usage: sanitize_drafts [shared], as
// sanitize.
#include "drafted.h"
#include "grown.h"
#include <climits>
#include <map>

namespace {

// ---------------------------------------------------------------- heads

Scored run_head(Engine* e, int head, const Floats& base, int hidden, const Ints& base_of, const Ints& tokens, int count = 0,
                const std::vector<const float*>& noise = {}, const Floats& scale = {}) {
    Scored out;
    int rows = static_cast<int>(base_of.size());
    HeadJob job{head, rows, static_cast<int>(base.size()) / hidden, base.data(), base_of.data(), tokens.empty() ? nullptr : tokens.data(), ranking(out, rows, count, noise, scale)};
    int code = entmtp_heads_run(e, &job);
    check(code == 0, "heads", code);
    return out;
}

// Whole trees: every child is the column of its rank when its parent's row is scored alone.
void fill_by_heads(World& w, Engine* e, Engine* alone, bool reads_tokens, int width) {
    const int hidden = w.weighted.c.hidden;
    Floats base = w.normal(2 * static_cast<size_t>(hidden));
    Tree first(w.weighted.rng, width, w.noises[0].data()), second(w.weighted.rng, 5, nullptr);
    EntmtpTree views[] = {first.view(2), second.view(1)};
    check(entmtp_heads_fill(e, base.data(), views, 2) == 0, "fill");
    for (int d = 0; d < 2; d++) {
        const EntmtpLevel& l = first.levels[d];
        for (int c = 0; c < l.children; c++) {
            Ints above;
            for (int t = 0; reads_tokens && t <= d; t++) above.push_back(first.tokens[l.paths[l.parents[c] * (d + 1) + t]]);
            Scored one = run_head(alone, d, base, hidden, {0}, above, 9, {first.noise[d]}, {0.7f});
            check(first.tokens[l.nodes[c]] == w.hot[one.best[l.ranks[c]]], "a child of a filled tree", c);
        }
    }
}

// A whole envelope is a filled tree, and codes are those of scores alone; other trees are parts of it,
// the same in a batch and alone.
void grow_by_heads(World& w, Engine* e, Engine* alone, bool reads_tokens, int width) {
    const int hidden = w.weighted.c.hidden;
    Floats base = w.normal(2 * static_cast<size_t>(hidden));
    Envelope first(w.weighted.rng, width, w.noises[0].data(), 2), second(w.weighted.rng, 5, nullptr, 1);
    EntmtpTree fills[] = {first.tree.view(2), second.tree.view(1)};
    check(entmtp_heads_fill(e, base.data(), fills, 2) == 0, "fill");
    EntmtpGrowth views[] = {first.view(), second.view()};
    check(entmtp_heads_grow(e, base.data(), views, 2) == 0, "growth");
    check_whole(first, views[0]), check_whole(second, views[1]);
    for (int d = 0; d < 2; d++) {
        const EntmtpLevel& l = first.levels[d];
        for (int c = 0; c < l.children; c++) {
            Ints above;
            for (int t = 0; reads_tokens && t <= d; t++) above.push_back(first.tokens[l.paths[l.parents[c] * (d + 1) + t]]);
            Floats scores = run_head(alone, d, base, hidden, {0}, above).scores;
            double sum = 0, own = scores[std::find(w.hot.begin(), w.hot.end(), first.tokens[l.nodes[c]]) - w.hot.begin()];
            for (float score : scores) sum += std::exp(score - own);
            double eighths = std::min(kCodesPerNat * std::log(sum), kCodes - 1.0);
            check(std::abs(eighths - first.codes[l.nodes[c]] - 0.5) < 0.501, "a code", c);
        }
    }
    for (int round = 0; round < 12; round++) {
        first.randomise(w.weighted.rng, first.tree.tokens), second.randomise(w.weighted.rng, second.tree.tokens);
        EntmtpGrowth both[] = {first.view(), second.view()};
        check(entmtp_heads_grow(e, base.data(), both, 2) == 0, "growth");
        check_grown(first, both[0], first.tree.tokens), check_grown(second, both[1], second.tree.tokens);
        Ints kept(first.kept), tokens(first.tokens);
        first.clear();
        EntmtpGrowth one = first.view();
        check(entmtp_heads_grow(alone, base.data(), &one, 1) == 0, "growth");
        check(one.num_kept == both[0].num_kept && one.attach == both[0].attach && first.kept == kept && first.tokens == tokens, "a tree that grows alone");
    }
}

// Trees that make no sense, for heads and blocks alike.
template <class Run> void bad_trees(World& w, int code_of_levels, Run run) {
    struct Bad { const char* what; void (*spoil)(Tree&, EntmtpTree&); };
    const Bad cases[] = {
        {"no nodes", [](Tree&, EntmtpTree& v) { v.num_nodes = 0; }},
        {"fewer nodes", [](Tree&, EntmtpTree& v) { v.num_nodes = 4; }},
        {"no levels", [](Tree&, EntmtpTree& v) { v.num_levels = 0; }},
        {"no tokens", [](Tree&, EntmtpTree& v) { v.tokens = nullptr; }},
        {"two roots", [](Tree& t, EntmtpTree&) { t.levels[0].rows = 2; }},
        {"rows below", [](Tree& t, EntmtpTree&) { t.levels[1].rows = -1; }},
        {"too many rows", [](Tree& t, EntmtpTree&) { t.levels[1].rows = INT_MAX; }},
        {"too many children", [](Tree& t, EntmtpTree&) { t.levels[1].children = INT_MAX; }},
        {"no width", [](Tree& t, EntmtpTree&) { t.levels[1].width = 0; }},
        {"more than are ranked", [](Tree& t, EntmtpTree&) { t.levels[0].width = kMaxBest + 1; }},
        {"a node below", [](Tree& t, EntmtpTree&) { t.arrays[1].nodes[0] = 0; }},
        {"a node above", [](Tree& t, EntmtpTree&) { t.arrays[1].nodes[1] = INT_MAX; }},
        {"a parent above", [](Tree& t, EntmtpTree&) { t.arrays[1].parents[1] = t.levels[1].rows; }},
        {"a rank above", [](Tree& t, EntmtpTree&) { t.arrays[0].ranks[1] = 9; }},
        {"a path beyond", [](Tree& t, EntmtpTree&) { t.arrays[1].paths[1] = static_cast<int>(t.tokens.size()); }},
        {"no paths", [](Tree& t, EntmtpTree&) { t.levels[1].paths = nullptr; }},
    };
    for (const Bad& bad : cases) {
        Tree tree(w.weighted.rng, 6, nullptr);
        EntmtpTree view = tree.view(2);
        check(run(tree, view) == 0, "the tree before it is spoiled");
        bad.spoil(tree, view);
        int code = run(tree, view);
        check(code == 11, bad.what, code);
    }
    Tree tree(w.weighted.rng, 6, nullptr);
    EntmtpTree view = tree.view(3);
    check(run(tree, view) == code_of_levels, "a tree of three depths");
    tree.tokens[0] = kTokens, view.num_levels = 1;
    int code = run(tree, view);
    check(code == 7 || (code == 0 && code_of_levels == 11), "a root above", code);
}

void bad_head_jobs(Engine* e, int hidden) {
    Floats base(2 * static_cast<size_t>(hidden)), scores(3 * kColumns), values(3 * kColumns);
    Ints base_of{0, 1, 0}, tokens{1, 2, 3, 4, 5, 6}, best(3 * kColumns);
    const float* noise[3] = {};
    struct Bad { int code; const char* what; void (*spoil)(HeadJob&, Ints&, Ints&); };
    const Bad cases[] = {
        {1, "a head below", [](HeadJob& j, Ints&, Ints&) { j.head = -1; }},
        {1, "a head above", [](HeadJob& j, Ints&, Ints&) { j.head = 2; }},
        {2, "no rows", [](HeadJob& j, Ints&, Ints&) { j.num_rows = 0; }},
        {2, "no base", [](HeadJob& j, Ints&, Ints&) { j.base = nullptr; }},
        {2, "no tokens", [](HeadJob& j, Ints&, Ints&) { j.tokens = nullptr; }},
        {3, "a base above", [](HeadJob&, Ints& b, Ints&) { b[2] = 2; }},
        {3, "a base below", [](HeadJob&, Ints& b, Ints&) { b[0] = INT_MIN; }},
        {7, "a token above", [](HeadJob&, Ints&, Ints& t) { t[5] = kTokens; }},
        {7, "a token below", [](HeadJob&, Ints&, Ints& t) { t[0] = -1; }},
        {9, "nothing wanted", [](HeadJob& j, Ints&, Ints&) { j.ranking.scores = nullptr; }},
        {9, "both wanted", [](HeadJob& j, Ints&, Ints&) { j.ranking.count = 1; }},
        {9, "a count below", [](HeadJob& j, Ints&, Ints&) { j.ranking.count = -1; }},
        {9, "more than are ranked", [](HeadJob& j, Ints&, Ints&) { j.ranking.scores = nullptr, j.ranking.count = kMaxBest + 1; }},
        {9, "noise without a scale", [](HeadJob& j, Ints&, Ints&) { j.ranking.scores = nullptr, j.ranking.count = 2, j.ranking.scale = nullptr; }},
        {9, "noise on all scores", [](HeadJob& j, Ints&, Ints&) { j.ranking.count = 0; }},
        {9, "sums beside all scores", [](HeadJob& j, Ints&, Ints&) { j.ranking.log_sums = j.ranking.values; }},
    };
    for (const Bad& bad : cases) {
        Ints own_base = base_of, own_tokens = tokens;
        HeadJob job{1, 3, 2, base.data(), own_base.data(), own_tokens.data(), {scores.data(), 0, best.data(), values.data(), nullptr, nullptr}};
        check(entmtp_heads_run(e, &job) == 0, "the job before it is spoiled");
        if (strstr(bad.what, "noise")) job.ranking.noise = noise, job.ranking.scale = values.data();
        bad.spoil(job, own_base, own_tokens);
        int code = entmtp_heads_run(e, &job);
        check(code == bad.code, bad.what, code);
    }
    Job forward{};
    Segment segment{};
    forward.num_rows = forward.num_segments = 1, forward.segments = &segment, forward.inputs = base.data();
    check(entmtp_forward(e, &forward) == 10, "a forward of heads");
}

void heads(World& w, bool is_shared) {
    const int hidden = w.weighted.c.hidden;
    auto biased = [&](int channels, int k) {
        return EntmtpMatrix{w.weighted.matrix(channels, k), w.weighted.vector(channels, 0, 0.2f), channels, k};
    };
    std::vector<EntmtpMatrix> matrices{biased(kColumns, hidden), biased(hidden, hidden), biased(2 * hidden, 2 * hidden), biased(2 * hidden, 3 * hidden)};
    matrices.push_back({matrices[0].packed, nullptr, kColumns, hidden});
    Ints twice{1, 1}, once{1};
    std::vector<EntmtpHead> hydra{{2, 0, 2, twice.data()}, {3, 4, 0, nullptr}}, medusa{{-1, 0, 1, once.data()}, {-1, 4, 0, nullptr}};
    for (const auto* list : {&hydra, &medusa}) {
        EntmtpHeads given{hidden, static_cast<int>(matrices.size()), 2, matrices.data(), list->data(), w.vocabulary()};
        Engine *e = entmtp_heads_new(w.target, &given), *alone = entmtp_heads_new(w.plain, &given);
        check(e && alone, "heads");
        for (int head = 0; head < 2; head++)
            for (int rows : {3, 40, 150}) {
                Floats base = w.normal(5 * static_cast<size_t>(hidden));
                Ints base_of, tokens;
                for (int r = 0; r < rows; r++) {
                    base_of.push_back(static_cast<int>(w.weighted.rng() % 5));
                    if (list == &hydra) for (int t = 0; t <= head; t++) tokens.push_back(static_cast<int>(w.weighted.rng() % kTokens));
                }
                Scored all = run_head(e, head, base, hidden, base_of, tokens);
                for (int r = 0; r < rows; r += 7) {
                    Ints own(tokens.begin() + (list == &hydra ? r * (head + 1) : 0), tokens.begin() + (list == &hydra ? (r + 1) * (head + 1) : 0));
                    Scored one = run_head(alone, head, base, hidden, {base_of[r]}, own);
                    check(memcmp(one.scores.data(), all.scores.data() + size_t(r) * kColumns, kColumns * sizeof(float)) == 0, "a row of a head", r);
                    num_compared++;
                }
                std::vector<const float*> noise;
                Floats scale;
                for (int r = 0; r < rows; r++) noise.push_back(r % 4 < 3 ? w.noises[r % 4].data() : nullptr), scale.push_back(0.5f + r % 3);
                for (int count : {1, 5, kMaxBest}) {
                    check_best(all.scores, run_head(e, head, base, hidden, base_of, tokens, count), rows, count, w.hot, {}, {});
                    check_best(all.scores, run_head(e, head, base, hidden, base_of, tokens, count, noise, scale), rows, count, w.hot, noise, scale);
                }
            }
        for (int width : {1, 7, 150}) if (!is_shared) fill_by_heads(w, e, alone, list == &hydra, width);
        for (int width : {1, 7, 21}) if (!is_shared) grow_by_heads(w, e, alone, list == &hydra, width);
        Floats base = w.normal(hidden);
        auto grow = [&](Envelope&, EntmtpGrowth& view) { return entmtp_heads_grow(e, base.data(), &view, 1); };
        if (!is_shared) {
            bad_trees(w, 11, [&](Tree&, EntmtpTree& view) { return entmtp_heads_fill(e, base.data(), &view, 1); });
            bad_growths(w, 2, grow), odd_growths(w, 2, grow);
            Envelope own(w.weighted.rng, 3, nullptr, 2);
            EntmtpGrowth view = own.view();
            check(entmtp_heads_grow(e, nullptr, &view, 1) == 2 && entmtp_heads_grow(e, base.data(), &view, 0) == 2, "nothing to grow");
        }
        if (list == &hydra && !is_shared) bad_head_jobs(e, hidden);
        entmtp_model_free(e), entmtp_model_free(alone);
    }
    EntmtpHeads given{hidden, 4, 2, matrices.data(), hydra.data(), w.vocabulary()};
    check(!entmtp_heads_new(w.target, &given), "an output that is not there");
    given.num_matrices = 5;
    std::swap(hydra[0].first, hydra[1].first);
    check(!entmtp_heads_new(w.target, &given), "matrices of other sizes");
    std::swap(hydra[0].first, hydra[1].first);
    given.vocabulary.embedding = nullptr;
    check(!entmtp_heads_new(w.target, &given), "no embedding");
    given.vocabulary = w.vocabulary(), given.vocabulary.tokens = 5;
    check(!entmtp_heads_new(w.target, &given), "a hot token beyond the others");
}

// ---------------------------------------------------------------- blocks

struct BlockRows {  // of one sequence in a job
    Cache* cache;
    Floats inputs;
    Ints tokens, positions, held;
    std::vector<uint8_t> mask;
};

struct BlockOut { Floats hidden; Scored scored; };

BlockOut run_block(Engine* e, const std::vector<const BlockRows*>& parts, int hidden, const Ints& wanted, bool is_joined, int count = 0) {
    Floats inputs;
    Ints tokens, positions;
    std::vector<Segment> segments;
    for (const BlockRows* p : parts) {
        segments.push_back({p->cache, static_cast<int>(positions.size()), static_cast<int>(p->positions.size()), p->mask.empty() ? nullptr : p->mask.data(),
                            p->held.data(), static_cast<int32_t>(p->held.size())});
        inputs.insert(inputs.end(), p->inputs.begin(), p->inputs.end());
        tokens.insert(tokens.end(), p->tokens.begin(), p->tokens.end());
        positions.insert(positions.end(), p->positions.begin(), p->positions.end());
    }
    BlockOut out{Floats(positions.size() * hidden), {}};
    Job job{};
    job.tokens = is_joined ? tokens.data() : nullptr, job.positions = positions.data();
    job.segments = segments.data(), job.num_segments = static_cast<int>(segments.size()), job.num_rows = static_cast<int>(positions.size());
    job.hidden = out.hidden.data(), job.inputs = inputs.data();
    job.logit_rows = wanted.data(), job.num_logit_rows = static_cast<int>(wanted.size());
    job.ranking = ranking(out.scored, static_cast<int>(wanted.size()), count, {}, {});
    int code = entmtp_forward(e, &job);
    check(code == 0, "block", code);
    return out;
}

struct Node { int parent, token; Ints path; };

Ints counted(int from, int count) {
    Ints v(count);
    std::iota(v.begin(), v.end(), from);
    return v;
}

void commit(Engine* e, Cache* cache, int count) {
    Ints rows = counted(0, count);
    check(entmtp_cache_commit(e, cache, rows.data(), count) == 0, "commit");
}

// A prefix in chunks, then a tree of four depths, each held behind the one before; all equal the same
// rows that are committed one by one in `alone`.
void block_tree(World& w, Engine* e, Engine* alone, bool is_joined, int width) {
    const int hidden = w.weighted.c.hidden;
    Floats text = w.normal(static_cast<size_t>(kPrefix) * hidden);
    Ints words;
    for (int i = 0; i < kPrefix; i++) words.push_back(static_cast<int>(w.weighted.rng() % kTokens));
    Cache *cache = entmtp_cache_new(e, kPrefix + 8 * width), *other = entmtp_cache_new(e, 4 * kPrefix);
    auto rows_at = [&](Cache* to, int from, int count) {
        return BlockRows{to, Floats(text.begin() + from * hidden, text.begin() + (from + count) * hidden), Ints(words.begin() + from, words.begin() + from + count),
                         counted(entmtp_cache_length(to), count), {}, {}};
    };
    BlockOut last;
    for (int at = 0; at < kPrefix; at += 44) {
        BlockRows mine = rows_at(cache, at, std::min(44, kPrefix - at)), company = rows_at(other, 9, 5);
        int size = static_cast<int>(mine.positions.size());
        last = run_block(e, {&company, &mine}, hidden, is_joined ? counted(size + 2, 3) : Ints{}, is_joined);
        last.hidden.erase(last.hidden.begin(), last.hidden.end() - hidden);
        commit(e, cache, size), commit(e, other, 5);
    }
    std::vector<Node> nodes{{-1, 0, {}}};
    std::map<int, Floats> feature{{0, last.hidden}}, scores;
    Ints level{0}, row_of_node{-1}, held;
    int row = 0;
    for (int depth = 1; depth <= 4; depth++) {
        Ints next;
        BlockRows mine{cache, {}, {}, {}, held, {}};
        for (int i = 0; i < width; i++) {
            int parent = level[w.weighted.rng() % level.size()], node = static_cast<int>(nodes.size());
            Ints path = nodes[parent].path;
            path.push_back(node);
            nodes.push_back({parent, static_cast<int>(w.weighted.rng() % kTokens), path});
            row_of_node.push_back(row++), next.push_back(node);
            mine.inputs.insert(mine.inputs.end(), feature[parent].begin(), feature[parent].end());
            mine.tokens.push_back(nodes[node].token), mine.positions.push_back(kPrefix + depth - 1);
        }
        int total = static_cast<int>(held.size()) + width;
        mine.mask.assign(static_cast<size_t>(width) * total, 0);
        for (int i = 0; i < width; i++) for (int a : nodes[next[i]].path) mine.mask[static_cast<size_t>(i) * total + row_of_node[a]] = 1;
        BlockRows company = rows_at(other, 3, 3);
        BlockOut out = run_block(e, {&mine, &company}, hidden, is_joined ? counted(0, width) : Ints{}, is_joined);
        for (int i = 0; i < width; i++) {
            feature[next[i]] = Floats(out.hidden.begin() + i * hidden, out.hidden.begin() + (i + 1) * hidden);
            if (is_joined) scores[next[i]] = Floats(out.scored.scores.begin() + i * kColumns, out.scored.scores.begin() + (i + 1) * kColumns);
        }
        if (is_joined) {
            BlockOut ranked = run_block(e, {&mine, &company}, hidden, counted(0, width), true, 6);
            check_best(out.scored.scores, ranked.scored, width, 6, w.hot, {}, {});
        }
        held.insert(held.end(), width, kPrefix + depth - 1);
        level = next;
    }
    for (int leaf : {level[0], level[width / 2], level[width - 1]}) {
        Cache* twin = entmtp_cache_new(alone, kPrefix + 8);
        BlockRows start = rows_at(twin, 0, kPrefix);
        BlockOut one = run_block(alone, {&start}, hidden, is_joined ? Ints{kPrefix - 1} : Ints{}, is_joined);
        commit(alone, twin, kPrefix);
        check(memcmp(one.hidden.data() + size_t(kPrefix - 1) * hidden, feature[0].data(), hidden * sizeof(float)) == 0, "the newest row");
        if (is_joined) check(std::equal(one.scored.scores.begin(), one.scored.scores.end(), last.scored.scores.end() - kColumns), "its scores");
        for (int node : nodes[leaf].path) {
            BlockRows own{twin, feature[nodes[node].parent], {nodes[node].token}, {entmtp_cache_length(twin)}, {}, {}};
            one = run_block(alone, {&own}, hidden, is_joined ? Ints{0} : Ints{}, is_joined);
            commit(alone, twin, 1);
            check(one.hidden == feature[node] && (!is_joined || one.scored.scores == scores[node]), "a row that is held", node);
            num_compared++;
        }
        entmtp_cache_free(twin);
    }
    entmtp_cache_free(cache), entmtp_cache_free(other);
}

// Two trees behind what waits of their texts: as on one thread, where each is filled alone.
void block_fill(World& w, Engine* e, Engine* alone, int width) {
    const int hidden = w.weighted.c.hidden;
    Tree first(w.weighted.rng, width, w.noises[1].data()), second(w.weighted.rng, 4, nullptr);
    Floats inputs = w.normal(9 * static_cast<size_t>(hidden));
    Ints words{1, 2, 3, 4, 5, 6, 7, 8, 9};
    auto text = [&](Engine* on, int rows, const Tree& tree) { return EntmtpText{entmtp_cache_new(on, rows + tree.num_held), rows, inputs.data(), words.data()}; };
    EntmtpText texts[] = {text(e, 9, first), text(e, 3, second)}, own[] = {text(alone, 9, first), text(alone, 3, second)};
    EntmtpTree views[] = {first.view(3), second.view(2)};
    check(entmtp_block_fill(e, texts, views, 2) == 0, "fill");
    Ints found[] = {first.tokens, second.tokens};
    for (int i = 0; i < 2; i++) {
        Ints& tokens = i ? second.tokens : first.tokens;
        std::fill(tokens.begin() + 1, tokens.end(), tokens[0]);
        check(entmtp_block_fill(alone, &own[i], &views[i], 1) == 0, "fill");
        check(tokens == found[i], "a filled tree", i);
        check(entmtp_cache_length(texts[i].cache) == texts[i].num_rows, "the text that was read");
        num_compared++;
    }
    EntmtpText full = texts[1];
    full.num_rows = 200;
    check(entmtp_block_fill(e, &full, views, 1) == 4, "more rows than fit");
    full = texts[1], full.inputs = nullptr;
    check(entmtp_block_fill(e, &full, views, 1) == 2 && entmtp_block_fill(e, texts, views, 0) == 2, "nothing to read");
    for (EntmtpText* list : {texts, own}) for (int i = 0; i < 2; i++) entmtp_cache_free(list[i].cache);
}

void bad_fills(World& w, Engine* e) {
    Floats inputs = w.normal(2 * static_cast<size_t>(w.weighted.c.hidden));
    Ints words{1, 2};
    auto run = [&](Tree& tree, EntmtpTree& view) {
        words[1] = tree.tokens[0];
        EntmtpText text{entmtp_cache_new(e, 64), 2, inputs.data(), words.data()};
        int code = entmtp_block_fill(e, &text, &view, 1);
        check(entmtp_cache_length(text.cache) == (code ? 0 : 2), "what a refused fill left");
        entmtp_cache_free(text.cache);
        return code;
    };
    bad_trees(w, 0, run);
    Tree tree(w.weighted.rng, 6, nullptr);
    EntmtpTree view = tree.view(2);
    tree.arrays[1].above[0] = 1;
    check(run(tree, view) == 11, "a row above that is not there");
    tree.arrays[1].above[0] = 0, tree.levels[1].mask = nullptr;
    check(run(tree, view) == 11, "no mask");
}

// A whole envelope behind what waits of a text is a filled tree; others are parts of it, the same in a
// batch and alone, whose rows are read one depth after the other.
void block_grow(World& w, Engine* e, Engine* alone, int width) {
    const int hidden = w.weighted.c.hidden;
    Envelope first(w.weighted.rng, width, w.noises[1].data(), 3), second(w.weighted.rng, 4, nullptr, 2);
    Floats inputs = w.normal(9 * static_cast<size_t>(hidden));
    Ints words{1, 2, 3, 4, 5, 6, 7, 8, 9};
    auto text = [&](Engine* on, int rows, const Envelope& own) { return EntmtpText{entmtp_cache_new(on, rows + own.tree.num_held), rows, inputs.data(), words.data()}; };
    EntmtpText texts[] = {text(e, 9, first), text(e, 3, second)}, own = text(alone, 9, first);
    auto again = [&] { for (EntmtpText* t : {&texts[0], &texts[1], &own}) check(entmtp_cache_truncate(t->cache, 0) == 0, "a text that is read again"); };
    EntmtpTree fills[] = {first.tree.view(3), second.tree.view(2)};
    check(entmtp_block_fill(e, texts, fills, 2) == 0, "fill");
    again();
    EntmtpGrowth views[] = {first.view(), second.view()};
    check(entmtp_block_grow(e, texts, views, 2) == 0, "growth");
    check_whole(first, views[0]), check_whole(second, views[1]);
    for (int round = 0; round < 12; round++) {
        again();
        first.randomise(w.weighted.rng, first.tree.tokens), second.randomise(w.weighted.rng, second.tree.tokens);
        EntmtpGrowth both[] = {first.view(), second.view()};
        check(entmtp_block_grow(e, texts, both, 2) == 0, "growth");
        check_grown(first, both[0], first.tree.tokens), check_grown(second, both[1], second.tree.tokens);
        check(entmtp_cache_length(texts[0].cache) == 9 && entmtp_cache_length(texts[1].cache) == 3, "the texts that were read");
        Ints kept(first.kept), tokens(first.tokens);
        first.clear();
        EntmtpGrowth one = first.view();
        check(entmtp_block_grow(alone, &own, &one, 1) == 0, "growth");
        check(one.num_kept == both[0].num_kept && one.attach == both[0].attach && first.kept == kept && first.tokens == tokens, "a tree that grows alone");
    }
    again();
    EntmtpText full = texts[0];
    full.num_rows = 200;
    check(entmtp_block_grow(e, &full, views, 1) == 4, "more rows than fit");
    full = texts[0], full.tokens = nullptr;
    check(entmtp_block_grow(e, &full, views, 1) == 2 && entmtp_block_grow(e, texts, views, 0) == 2, "nothing to read");
    for (EntmtpText* t : {&texts[0], &texts[1], &own}) entmtp_cache_free(t->cache);
}

void bad_block_growths(World& w, Engine* e) {
    Floats inputs = w.normal(2 * static_cast<size_t>(w.weighted.c.hidden));
    Ints words{1, 2};
    auto run = [&](Envelope& own, EntmtpGrowth& view) {
        words[1] = own.tree.tokens[0];
        EntmtpText text{entmtp_cache_new(e, 64), 2, inputs.data(), words.data()};
        int code = entmtp_block_grow(e, &text, &view, 1);
        check(entmtp_cache_length(text.cache) == (code ? 0 : 2), "what a refused growth left");
        entmtp_cache_free(text.cache);
        return code;
    };
    bad_growths(w, 3, run), odd_growths(w, 3, run);
}

struct BadBlock { int code; const char* what; void (*spoil)(Job&, Segment&, Ints&, Ints&, Ints&); };

void bad_block_jobs(World& w, Engine* e) {
    const int hidden = w.weighted.c.hidden;
    const BadBlock cases[] = {
        {2, "no cache", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.cache = nullptr; }},
        {3, "held below", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.held = -1; }},
        {3, "held far above", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.held = INT_MAX; }},
        {3, "more behind than fit", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.held = kMaxPending - 2; }},
        {3, "held without positions", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.held_positions = nullptr; }},
        {3, "held without a mask", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.mask = nullptr; }},
        {4, "more than the cache has", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.held = 62; }},
        {5, "a held position below", [](Job&, Segment&, Ints&, Ints&, Ints& h) { h[1] = 4; }},
        {5, "a held position above", [](Job&, Segment&, Ints&, Ints&, Ints& h) { h[1] = INT_MAX; }},
        {5, "a position above", [](Job&, Segment&, Ints&, Ints& p, Ints&) { p[2] = 10; }},
        {7, "a token above", [](Job&, Segment&, Ints& t, Ints&, Ints&) { t[1] = kTokens; }},
        {8, "scores of no row", [](Job& j, Segment&, Ints&, Ints&, Ints&) { static const int32_t beyond[] = {1, 3}; j.logit_rows = beyond; }},
        {9, "nothing wanted", [](Job& j, Segment&, Ints&, Ints&, Ints&) { j.ranking.scores = nullptr; }},
        {10, "no inputs", [](Job& j, Segment&, Ints&, Ints&, Ints&) { j.inputs = nullptr; }},
        {10, "no tokens", [](Job& j, Segment&, Ints&, Ints&, Ints&) { j.tokens = nullptr; }},
    };
    Cache* cache = entmtp_cache_new(e, 64);
    BlockRows text{cache, w.normal(5 * static_cast<size_t>(hidden)), {1, 2, 3, 4, 5}, {0, 1, 2, 3, 4}, {}, {}};
    run_block(e, {&text}, hidden, {4}, true);
    commit(e, cache, 5);
    Floats inputs = w.normal(3 * static_cast<size_t>(hidden)), scores(2 * kColumns);
    std::vector<uint8_t> mask(3 * 5, 1);
    for (const BadBlock& bad : cases) {
        Ints tokens{1, 2, 3}, positions{7, 7, 6}, held{5, 6}, wanted{0, 2};
        Segment segment{cache, 0, 3, mask.data(), held.data(), 2};
        Job job{};
        job.tokens = tokens.data(), job.positions = positions.data(), job.segments = &segment, job.num_segments = 1, job.num_rows = 3;
        job.inputs = inputs.data(), job.logit_rows = wanted.data(), job.num_logit_rows = 2, job.ranking.scores = scores.data();
        check(entmtp_forward(e, &job) == 0, "the job before it is spoiled");
        bad.spoil(job, segment, tokens, positions, held);
        int code = entmtp_forward(e, &job);
        check(code == bad.code, bad.what, code);
        if (bad.code == 10) continue;
        job.inputs = inputs.data();
        check(entmtp_forward(w.target, &job) == 10, "a target given rows");
    }
    check(entmtp_cache_truncate(cache, 3) == 0 && entmtp_cache_length(cache) == 3, "a cut");
    entmtp_cache_free(cache);
}

void blocks(World& w, bool is_shared, int width) {
    Config c = w.weighted.c;
    c.layers = 1, c.vocab = kColumns;
    for (bool is_joined : {true, false}) {
        if (!is_joined) c.vocab = 0;
        Weighted own(c, w.weighted.isa.c_str());
        own.w.embedding = nullptr;
        if (!is_joined) own.w.head = nullptr;
        EntmtpFront front{};
        if (is_joined) front = {own.matrix(c.hidden, 2 * c.hidden), width % 2, own.vector(kColumns, 0, 0.3f), w.vocabulary()};
        Engine *e = entmtp_block_new(w.target, &c, &own.w, &front), *alone = entmtp_block_new(w.plain, &c, &own.w, &front);
        check(e && alone, "block");
        block_tree(w, e, alone, is_joined, width);
        if (is_joined && !is_shared) block_fill(w, e, alone, width), bad_fills(w, e), bad_block_jobs(w, e);
        if (is_joined && !is_shared && width <= 20) block_grow(w, e, alone, width), bad_block_growths(w, e);
        if (is_joined) {
            EntmtpFront bad = front;
            bad.vocabulary.embedding = nullptr;
            check(!entmtp_block_new(w.target, &c, &own.w, &bad), "a join without an embedding");
            bad = front, bad.vocabulary.columns = kColumns - 1;
            check(!entmtp_block_new(w.target, &c, &own.w, &bad), "a head of another size");
        }
        entmtp_model_free(e), entmtp_model_free(alone);
    }
}

} // namespace

int main(int argc, char** argv) {
    bool is_shared = argc > 1 && strcmp(argv[1], "shared") == 0, is_first = true;
    //             layers hidden heads kv dim inter vocab positions | biases, norm | mix odd | eps
    const Config grouped{1, 96, 4, 2, 32, 32, 64, 270, 0, 0, 0, 0, 2, 3, 1e-6f};
    const Config biased{1, 32, 5, 1, 96, 64, 64, 270, 1, 1, 1, 1, 4, 1, 1e-5f};
    for (const char* isa : {"avx512", "avx2", "portable"}) {
        if (!entmtp_isa_supported(isa) || (is_shared && !is_first)) continue;
        is_first = false;
        for (const Config& c : {grouped, biased}) {
            World world(c, isa, 3);
            for (int threads : {3, 2, 1}) {
                if (is_shared && threads == 1) continue;
                check(entmtp_model_threads(world.target, threads) == 0, "threads");
                heads(world, is_shared);
                for (int width : {3, 20}) blocks(world, is_shared, width);
                if (threads == 2) blocks(world, is_shared, 150);
            }
            printf("%s, hidden size %d: %d rows compared so far\n", isa, c.hidden, num_compared), fflush(stdout);
        }
    }
    puts("OK");
}
