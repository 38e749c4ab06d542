// What drafters are made from in the program that runs under sanitizers, and trees for them.
#pragma once
#include "weighted.h"
#include <algorithm>
#include <deque>
#include <numeric>

namespace {

constexpr int kTokens = 90, kColumns = 75, kPrefix = 131;

struct Scored { Floats scores, values; Ints best; };

// Where a job puts what is wanted of `rows` rows: all scores, or the best columns under noise.
Ranking ranking(Scored& out, int rows, int count, const std::vector<const float*>& noise, const Floats& scale) {
    out.scores.assign(count ? 0 : size_t(rows) * kColumns, 0), out.best.assign(size_t(rows) * count, -1);
    out.values.assign(size_t(rows) * count, 0);
    if (!count) return {out.scores.data(), 0, nullptr, nullptr, nullptr, nullptr};
    return {nullptr, count, out.best.data(), out.values.data(), noise.empty() ? nullptr : noise.data(), noise.empty() ? nullptr : scale.data()};
}

// The columns are those of a stable sort of all scores.
void check_best(const Floats& scores, const Scored& ranked, int rows, int count, const Ints& hot, const std::vector<const float*>& noise, const Floats& scale) {
    for (int r = 0; r < rows; r++) {
        Floats z(scores.begin() + r * kColumns, scores.begin() + (r + 1) * kColumns);
        if (!noise.empty() && noise[r]) for (int i = 0; i < kColumns; i++) z[i] = noise[r][i] + z[i] * scale[r];
        Ints order(kColumns);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return z[a] > z[b]; });
        for (int i = 0; i < count; i++) check(ranked.best[size_t(r) * count + i] == order[i], "the best columns", r);
    }
}

struct World {  // a target's threads, and what drafters read of it
    Weighted weighted;
    Engine *target, *plain;
    const float* embedding;
    Ints hot;
    std::vector<Floats> noises;
    World(const Config& c, const char* isa, int threads) : weighted(c, isa) {
        target = entmtp_model_new(&c, &weighted.w, threads, isa);
        plain = entmtp_model_new(&c, &weighted.w, 1, isa);
        check(target && plain, "model");
        embedding = weighted.vector(size_t(kTokens) * c.hidden, 0, 1);
        for (int i = 0; i < kColumns; i++) hot.push_back((i * 7 + 3) % kTokens);
        for (int i = 0; i < 3; i++) noises.push_back(normal(kTokens));
    }
    World(const World&) = delete;
    ~World() { entmtp_model_free(target), entmtp_model_free(plain); }
    Vocabulary vocabulary() const { return {embedding, 1.5f, kTokens, kColumns, hot.data()}; }
    Floats normal(size_t size) { weighted.vector(size, 0, 1); return weighted.floats.back(); }
};

// A random tree of three depths with `width` nodes each, every second of which has children.
struct Tree {
    struct Arrays { Ints paths, nodes, parents, ranks, above; std::vector<uint8_t> mask; };
    std::deque<Arrays> arrays;
    std::vector<EntmtpLevel> levels;
    std::vector<const float*> noise;
    Ints tokens;
    int num_held = 0;
    Tree(std::mt19937& rng, int width, const float* noisy) {
        std::vector<Ints> rows{{0}}, above_rows;  // paths of nodes
        int node = 1;
        Ints held_of{-1};                         // row of a node among those that are held
        for (int d = 0; d < 3; d++) {
            Arrays a;
            std::vector<Ints> next, kept;
            for (const Ints& row : rows) a.paths.insert(a.paths.end(), row.begin(), row.end());
            for (int i = 0; i < width; i++) {
                int parent = static_cast<int>(i < static_cast<int>(rows.size()) ? i : rng() % rows.size());
                a.nodes.push_back(node), a.parents.push_back(parent), a.ranks.push_back(static_cast<int>(rng() % 9));
                Ints path = rows[parent];
                path.push_back(node++), held_of.push_back(-1), next.push_back(path);
            }
            if (d) {
                int before = num_held, own = static_cast<int>(rows.size());
                for (int r = 0; r < own; r++) held_of[rows[r].back()] = num_held++;
                a.mask.assign(static_cast<size_t>(own) * num_held, 0);
                for (int r = 0; r < own; r++) {
                    for (size_t k = 1; k < rows[r].size(); k++) a.mask[static_cast<size_t>(r) * num_held + held_of[rows[r][k]]] = 1;
                    for (size_t k = 0; k < above_rows.size(); k++) if (above_rows[k].back() == rows[r][rows[r].size() - 2]) a.above.push_back(static_cast<int>(k));
                }
                check(static_cast<int>(a.above.size()) == own && before + own == num_held, "a tree of the test");
            }
            arrays.push_back(a);
            const Arrays& to = arrays.back();
            levels.push_back({static_cast<int32_t>(rows.size()), width, 9, to.paths.data(), to.nodes.data(), to.parents.data(), to.ranks.data(), to.above.data(), to.mask.data()});
            for (int i = 0; i < width; i += 2) kept.push_back(next[i]);
            above_rows = rows, rows = kept;
            noise.push_back(d % 2 ? nullptr : noisy);
        }
        tokens.assign(node, static_cast<int>(rng() % kTokens));
    }
    Tree(const Tree&) = delete;
    EntmtpTree view(int depth) { return {static_cast<int32_t>(tokens.size()), depth, levels.data(), tokens.data(), noise.data(), 0.7f}; }
};

} // namespace
