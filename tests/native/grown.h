// Trees that grow inside an envelope, for the program that runs under sanitizers.
#pragma once
#include "drafted.h"
#include <climits>
#include <cmath>
#include <limits>

namespace {

constexpr uint8_t kUnscored = 255;

using Doubles = std::vector<double>;

// A random tree as an envelope, all of which is worth it until it is given random tables. Buffers are
// as large as the core may use and no larger, so that sanitizers see what lies beyond.
struct Envelope {
    Tree tree;
    std::vector<EntmtpLevel> levels;
    int num_levels, num_nodes;
    Ints parent_of, depth_of, tokens, copied, kept;
    Floats table;
    Doubles rows_ms, draft_ms, draft_row_ms, gains, hits, mixes;
    std::vector<uint8_t> codes;
    double rate = 0;
    Envelope(std::mt19937& rng, int width, const float* noisy, int depths) : tree(rng, width, noisy), levels(tree.levels), num_levels(depths), num_nodes(static_cast<int>(tree.tokens.size())) {
        parent_of.assign(num_nodes, -1), depth_of.assign(num_nodes, 0);
        for (int d = 0; d < 3; d++) {
            EntmtpLevel& l = levels[d];
            for (int c = 0; c < l.children; c++) parent_of[l.nodes[c]] = l.paths[size_t(l.parents[c]) * (d + 1) + d], depth_of[l.nodes[c]] = d + 1;
            l.above = nullptr, l.mask = nullptr;
        }
        table.assign(size_t(num_nodes - 1) * kCodes, 1.f);
        rows_ms.assign(num_nodes, 0), draft_ms.assign(depths, 0), draft_row_ms.assign(depths, 0), gains.assign(depths, 1);
        clear();
    }
    // Nodes of the depths that are allowed.
    int reachable() const { return num_levels * levels[0].children; }
    void clear() {
        tokens.assign(num_nodes, tree.tokens[0]), codes.assign(num_nodes, kUnscored), kept.assign(num_nodes + copied.size(), -1);
    }
    EntmtpGrowth view() {
        return {num_nodes, num_levels, levels.data(), table.data(), rows_ms.data(), draft_ms.data(), draft_row_ms.data(), gains.data(), rate, tokens.data(),
                tree.noise.data(), 0.7f, static_cast<int32_t>(copied.size()), copied.data(), hits.data(), mixes.data(), codes.data(), kept.data(), 0, 0};
    }
    // Any tables and costs; a copy that follows a path of the filled tree for a while.
    void randomise(std::mt19937& rng, const Ints& filled) {
        std::uniform_real_distribution<double> any(0, 1);
        copied.clear();
        for (int node = static_cast<int>(rng() % (reachable() + 1)); node > 0; node = parent_of[node]) copied.insert(copied.begin(), filled[node]);
        copied.resize(std::min<size_t>(copied.size(), rng() % 4));
        for (int i = static_cast<int>(rng() % (kMaxCopy - 2)); i > 0; i--) copied.push_back(static_cast<int>(rng() % kTokens));
        auto draw = [&](auto& values, size_t size, double most) {
            values.resize(size);
            for (auto& v : values) v = any(rng) * most;
        };
        draw(table, table.size(), 1), draw(hits, copied.size(), 1), draw(mixes, copied.size(), 1);
        draw(draft_ms, num_levels, 0.4), draw(draft_row_ms, num_levels, 0.1), draw(gains, num_levels, 2), draw(rows_ms, num_nodes + copied.size(), 0.3);
        std::partial_sum(rows_ms.begin(), rows_ms.end(), rows_ms.begin());
        const double rates[] = {0, 0.2, 0.5, 1, 100};
        rate = rates[rng() % 5];
        clear();
    }
};

// A tree that grew whole: all nodes in order, with the tokens of filling.
void check_whole(const Envelope& own, const EntmtpGrowth& grown) {
    check(grown.num_kept == own.reachable() && grown.attach == 0, "nodes of a whole envelope", grown.num_kept);
    for (int n = 0; n < own.num_nodes; n++) {
        bool is_there = n && n <= own.reachable();
        check((own.codes[n] < kCodes) == is_there && (is_there || own.codes[n] == kUnscored), "a code of a whole envelope", n);
        if (is_there) check(own.kept[n - 1] == n, "the order of equal nodes", n);
    }
    check(own.tokens == own.tree.tokens, "a whole envelope");
    num_compared++;
}

// Kept nodes are a tree of scored nodes and of the end of the copy; tokens are those of filling.
void check_grown(const Envelope& own, const EntmtpGrowth& grown, const Ints& filled) {
    const int size = own.num_nodes, most = size + static_cast<int>(own.copied.size());
    check(grown.num_kept >= 0 && grown.num_kept < most && grown.attach >= 0 && grown.attach < size, "numbers of a grown tree");
    for (int n = 0; n < size; n++) {
        check(own.tokens[n] == (own.codes[n] == kUnscored ? filled[0] : filled[n]), "a token of a grown tree", n);
        check(own.codes[n] == kUnscored || !own.parent_of[n] || own.codes[own.parent_of[n]] != kUnscored, "a row that was not scored", n);
    }
    for (int n = grown.attach, at = own.depth_of[n]; n > 0; n = own.parent_of[n]) check(own.tokens[n] == own.copied[--at], "a node on the copy", n);
    std::vector<bool> is_kept(most, false);
    is_kept[0] = true;
    for (int i = 0; i < grown.num_kept; i++) {
        int n = own.kept[i], first = size + own.depth_of[grown.attach];
        check(n > 0 && n < most && !is_kept[n] && (n >= size ? n >= first : own.codes[n] != kUnscored), "a node that is kept", n);
        check(is_kept[n < size ? own.parent_of[n] : n == first ? grown.attach : n - 1], "a node without its parent", n);
        is_kept[n] = true;
    }
    num_compared++;
}

// Growths that make no sense, for heads and blocks alike.
template <class Run> void bad_growths(World& w, int depths, Run run) {
    struct Bad { const char* what; void (*spoil)(Envelope&, EntmtpGrowth&); };
    const Bad cases[] = {
        {"no nodes", [](Envelope&, EntmtpGrowth& v) { v.num_nodes = 0; }},
        {"too many nodes", [](Envelope&, EntmtpGrowth& v) { v.num_nodes = kMaxEnvelope + 1; }},
        {"no depths", [](Envelope&, EntmtpGrowth& v) { v.num_levels = 0; }},
        {"no levels", [](Envelope&, EntmtpGrowth& v) { v.levels = nullptr; }},
        {"a copy below", [](Envelope&, EntmtpGrowth& v) { v.num_copied = -1; }},
        {"too long a copy", [](Envelope&, EntmtpGrowth& v) { v.num_copied = kMaxCopy + 1; }},
        {"a copy without tokens", [](Envelope&, EntmtpGrowth& v) { v.copied = nullptr; }},
        {"a copy without hits", [](Envelope&, EntmtpGrowth& v) { v.hits = nullptr; }},
        {"a copy without mixes", [](Envelope&, EntmtpGrowth& v) { v.mixes = nullptr; }},
        {"no table", [](Envelope&, EntmtpGrowth& v) { v.table = nullptr; }},
        {"no costs of rows", [](Envelope&, EntmtpGrowth& v) { v.rows_ms = nullptr; }},
        {"no costs of first rows", [](Envelope&, EntmtpGrowth& v) { v.draft_ms = nullptr; }},
        {"no costs of further rows", [](Envelope&, EntmtpGrowth& v) { v.draft_row_ms = nullptr; }},
        {"no gains", [](Envelope&, EntmtpGrowth& v) { v.gains = nullptr; }},
        {"no tokens", [](Envelope&, EntmtpGrowth& v) { v.tokens = nullptr; }},
        {"no codes", [](Envelope&, EntmtpGrowth& v) { v.codes = nullptr; }},
        {"no place for nodes", [](Envelope&, EntmtpGrowth& v) { v.kept = nullptr; }},
        {"no paths", [](Envelope& e, EntmtpGrowth&) { e.levels[1].paths = nullptr; }},
        {"a width above", [](Envelope& e, EntmtpGrowth&) { e.levels[1].width = kMaxBest + 1; }},
        {"a rank above", [](Envelope& e, EntmtpGrowth&) { e.tree.arrays[1].ranks[0] = 9; }},
        {"a node above", [](Envelope& e, EntmtpGrowth&) { e.tree.arrays[1].nodes[0] = e.num_nodes; }},
        {"a parent above", [](Envelope& e, EntmtpGrowth&) { e.tree.arrays[1].parents[0] = INT_MAX; }},
        {"a path from elsewhere", [](Envelope& e, EntmtpGrowth&) { e.tree.arrays[1].paths[0] = 1; }},
        {"a path that stays", [](Envelope& e, EntmtpGrowth&) { e.tree.arrays[1].paths[1] = 0; }},
        {"a path to another depth", [](Envelope& e, EntmtpGrowth&) { e.tree.arrays[1].paths[1] = e.num_nodes - 1; }},
        {"a child of two depths", [](Envelope& e, EntmtpGrowth&) { e.tree.arrays[1].nodes[0] = e.tree.arrays[0].nodes[0]; }},
        {"a row without children", [](Envelope& e, EntmtpGrowth&) { std::fill(e.tree.arrays[1].parents.begin(), e.tree.arrays[1].parents.end(), 0); }},
        {"a child twice", [](Envelope& e, EntmtpGrowth&) { e.tree.arrays[1].nodes[0] = e.tree.arrays[1].nodes[1]; }},
    };
    auto made = [&](const char* what, auto spoil) {
        Envelope own(w.weighted.rng, 6, nullptr, depths);
        own.randomise(w.weighted.rng, own.tree.tokens);
        own.copied.resize(2), own.hits.resize(2), own.mixes.resize(2), own.rows_ms.resize(own.num_nodes + 2), own.clear();
        EntmtpGrowth view = own.view();
        int code = run(own, view);
        check(code == 0, "the growth before it is spoiled", code);
        spoil(own, view);
        code = run(own, view);
        check(code == 11, what, code);
    };
    for (const Bad& bad : cases) made(bad.what, bad.spoil);
    if (depths < 3) made("deeper than there are heads", [](Envelope&, EntmtpGrowth& v) { v.num_levels = 3; });
    else made("a path that is not one", [](Envelope& e, EntmtpGrowth&) {
        Ints& paths = e.tree.arrays[2].paths;
        paths[1] = paths[1] == 1 ? 3 : 1;  // a row, but not that above
    });
}

// Numbers that are no probabilities and no costs choose some tree, and touch nothing beyond it.
template <class Run> void odd_growths(World& w, int depths, Run run) {
    const double odd[] = {-1, 1e300, -1e300, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()};
    for (int round = 0; round < 24; round++) {
        Envelope own(w.weighted.rng, 7, nullptr, depths);
        own.randomise(w.weighted.rng, own.tree.tokens);
        auto spoil = [&](auto& values) { for (auto& v : values) if (w.weighted.rng() % 3 == 0) v = odd[w.weighted.rng() % 6]; };
        if (round % 4 == 0) spoil(own.table);
        if (round % 4 == 1) spoil(own.hits), spoil(own.mixes);
        if (round % 4 == 2) spoil(own.draft_row_ms), spoil(own.draft_ms), spoil(own.rows_ms);
        if (round % 4 == 3) spoil(own.gains);
        EntmtpGrowth view = own.view();
        check(run(own, view) == 0, "odd numbers");
        check(view.num_kept >= 0 && view.num_kept < own.num_nodes + static_cast<int>(own.copied.size()), "nodes of an odd growth", view.num_kept);
    }
}

} // namespace
