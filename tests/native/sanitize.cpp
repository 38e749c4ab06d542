// The C interface from end to end, to be compiled with sanitizers: chunks, trees, companions,
// commits, caches that grow, threads, jobs that must be refused. Every row is compared, bit for
// bit, with the same token decoded alone. Usage: sanitize [shared]; `shared` keeps to jobs of
// three rows or more, whose preparation is shared between threads, and to the fastest instruction
// set. (Of one or two rows each thread prepares its own copy; one that comes late may read what is
// written by then, and drops it unused: a race in form.)
#include "weighted.h"
#include <algorithm>
#include <climits>

namespace {

struct Text {  // the cache of one sequence
    Engine* e;
    Cache* cache;
    Text(Engine* engine, int capacity) : e(engine), cache(entmtp_cache_new(engine, capacity)) { check(cache, "cache"); }
    Text(const Text&) = delete;
    ~Text() { entmtp_cache_free(cache); }
    int length() const { return entmtp_cache_length(cache); }
    void reserve(int rows) {
        if (length() + rows > entmtp_cache_capacity(cache)) cache = entmtp_cache_grow(e, cache, length() + rows);
    }
    void commit(const Ints& rows) {
        check(entmtp_cache_commit(e, cache, rows.data(), static_cast<int>(rows.size())) == 0, "commit");
    }
    void commit_first(int count) {
        Ints rows;
        for (int i = 0; i < count; i++) rows.push_back(i);
        commit(rows);
    }
};

struct Part {  // of one sequence in a job
    Text* text;
    Ints tokens, depths;
    std::vector<uint8_t> mask;
};

Part chain(Text& text, const Ints& tokens, size_t from, size_t count) {
    Part p{&text, Ints(tokens.begin() + static_cast<long>(from), tokens.begin() + static_cast<long>(from + count)), {}, {}};
    for (size_t i = 0; i < count; i++) p.depths.push_back(static_cast<int>(i));
    return p;
}

struct Out { Floats hidden, logits; std::vector<RowStats> stats; };

Out forward(Engine* e, const Config& c, std::vector<Part*> parts, bool keeps_logits = true) {
    Ints tokens, positions, rows;
    std::vector<Segment> segments;
    for (Part* p : parts) {
        int size = static_cast<int>(p->tokens.size());
        p->text->reserve(size);
        segments.push_back({p->text->cache, static_cast<int>(tokens.size()), size, p->mask.empty() ? nullptr : p->mask.data()});
        for (int i = 0; i < size; i++) {
            rows.push_back(static_cast<int>(tokens.size()));
            tokens.push_back(p->tokens[i]), positions.push_back(p->text->length() + p->depths[i]);
        }
    }
    Out out{Floats(tokens.size() * c.hidden), Floats(keeps_logits ? tokens.size() * c.vocab : 0), std::vector<RowStats>(tokens.size())};
    Job job{tokens.data(), positions.data(), segments.data(), static_cast<int>(segments.size()), static_cast<int>(tokens.size()),
            out.hidden.data(), rows.data(), static_cast<int>(rows.size()), keeps_logits ? out.logits.data() : nullptr, out.stats.data()};
    int code = entmtp_forward(e, &job);
    check(code == 0, "forward", code);
    return out;
}

void equal(const Config& c, const Out& a, size_t row, const Out& b, size_t other, const char* what) {
    auto same = [&](const Floats& x, const Floats& y, size_t n) {
        return x.empty() || y.empty() || memcmp(x.data() + row * n, y.data() + other * n, n * sizeof(float)) == 0;
    };
    check(same(a.hidden, b.hidden, c.hidden), what, static_cast<long>(row));
    check(same(a.logits, b.logits, c.vocab), what, static_cast<long>(row));
    check(memcmp(&a.stats[row], &b.stats[other], sizeof(RowStats)) == 0, what, static_cast<long>(row));
    num_compared++;
}

void append(Out& all, const Out& more) {
    all.hidden.insert(all.hidden.end(), more.hidden.begin(), more.hidden.end());
    all.logits.insert(all.logits.end(), more.logits.begin(), more.logits.end());
    all.stats.insert(all.stats.end(), more.stats.begin(), more.stats.end());
}

Out one_by_one(Engine* e, const Config& c, Text& text, const Ints& tokens) {
    Out all;
    for (size_t i = 0; i < tokens.size(); i++) {
        Part p = chain(text, tokens, i, 1);
        append(all, forward(e, c, {&p}));
        text.commit({0});
    }
    return all;
}

Ints random_tokens(std::mt19937& rng, int count, int vocab) {
    Ints t;
    for (int i = 0; i < count; i++) t.push_back(static_cast<int>(rng() % vocab));
    return t;
}

// Chunks of many sizes beside another sequence, into a cache that begins with one row.
void chunks(Engine* e, const Config& c, const Ints& tokens, const Out& alone, bool is_shared) {
    Text text(e, 1), other(e, 1);
    Ints sizes = is_shared ? Ints{3, 16, 131, 5, 9} : Ints{1, 2, 3, 131, 17, 1, 5, 2};
    for (size_t at = 0, turn = 0; at < tokens.size(); turn++) {
        size_t count = std::min(tokens.size() - at, static_cast<size_t>(sizes[turn % sizes.size()]));
        if (is_shared && count < 3) break;
        Part mine = chain(text, tokens, at, count), company = chain(other, tokens, 3, 4);
        bool is_second = turn % 3 == 1;
        std::vector<Part*> parts = turn % 3 == 0 ? std::vector<Part*>{&mine} : is_second ? std::vector<Part*>{&company, &mine} : std::vector<Part*>{&mine, &company};
        Out out = forward(e, c, parts, turn % 4 != 3);
        for (size_t i = 0; i < count; i++) equal(c, out, i + (is_second ? 4 : 0), alone, at + i, "a row of a chunk");
        text.commit_first(static_cast<int>(count)), at += count;
        if (parts.size() == 2) other.commit_first(4);
    }
}

// A random tree of `nodes` rows; parent[0] is -1.
Ints make_tree(Part& p, std::mt19937& rng, int nodes, int vocab) {
    Ints parent(nodes, -1);
    p.mask.assign(static_cast<size_t>(nodes) * nodes, 0), p.depths.assign(nodes, 0);
    p.tokens = random_tokens(rng, nodes, vocab);
    for (int i = 0; i < nodes; i++) {
        if (i) parent[i] = std::max(0, i - 1 - static_cast<int>(rng() % 5)), p.depths[i] = p.depths[parent[i]] + 1;
        for (int a = i; a >= 0; a = parent[a]) p.mask[static_cast<size_t>(i) * nodes + a] = 1;
    }
    return parent;
}

// Two trees and a chunk in one job; paths of the first, and what follows a commit, equal the same
// tokens one by one in the model `plain`.
void trees(Engine* e, Engine* plain, const Config& c, const Ints& tokens, int prefix, int nodes) {
    std::mt19937 rng(static_cast<unsigned>(prefix));
    Text text(e, prefix), second(e, 4), third(e, 1);
    Part start = chain(text, tokens, 0, prefix), other = chain(second, tokens, 5, 7);
    forward(e, c, {&start, &other}, false);
    text.commit_first(prefix), second.commit_first(7);
    Part tree{&text, {}, {}, {}}, beside{&second, {}, {}, {}}, chunk = chain(third, tokens, 1, 9);
    Ints parent = make_tree(tree, rng, nodes, c.vocab);
    make_tree(beside, rng, 12, c.vocab);
    Out out = forward(e, c, {&chunk, &tree, &beside});
    Ints path;
    for (int node : {nodes / 3, nodes / 2, nodes - 1}) {
        path.clear();
        for (int a = node; a >= 0; a = parent[a]) path.insert(path.begin(), a);
        Text twin(plain, prefix);
        Part same = chain(twin, tokens, 0, prefix);
        forward(plain, c, {&same}, false);
        twin.commit_first(prefix);
        Ints on_path;
        for (int a : path) on_path.push_back(tree.tokens[a]);
        Out alone = one_by_one(plain, c, twin, on_path);
        for (size_t i = 0; i < path.size(); i++) equal(c, out, 9 + static_cast<size_t>(path[i]), alone, i, "a node of a tree");
        if (node != nodes - 1) continue;
        text.commit(path);
        Part next = chain(text, tokens, 20, 4);
        Out after = forward(e, c, {&next}), expected = one_by_one(plain, c, twin, Ints(tokens.begin() + 20, tokens.begin() + 24));
        for (size_t i = 0; i < 4; i++) equal(c, after, i, expected, i, "a row after a commit");
    }
}

struct Bad { int code; const char* what; void (*spoil)(Job&, Segment&, Ints&, Ints&, Ints&); };

// Every array has exactly its size, so that a sanitizer sees a read beyond it.
void bad_jobs(Engine* e, const Config& c) {
    const Bad cases[] = {
        {1, "no rows", [](Job& j, Segment&, Ints&, Ints&, Ints&) { j.num_rows = 0; }},
        {1, "no segments", [](Job& j, Segment&, Ints&, Ints&, Ints&) { j.num_segments = 0; }},
        {2, "no cache", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.cache = nullptr; }},
        {2, "a gap", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.first_row = 1; }},
        {2, "an empty segment", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.num_rows = 0; }},
        {2, "rows without a segment", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.num_rows = 2; }},
        {2, "a segment beyond the rows", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.num_rows = 40; }},
        {2, "a huge segment", [](Job&, Segment& s, Ints&, Ints&, Ints&) { s.num_rows = INT_MAX; }},
        {5, "a position before", [](Job&, Segment&, Ints&, Ints& p, Ints&) { p[0] = 4; }},
        {5, "a position far before", [](Job&, Segment&, Ints&, Ints& p, Ints&) { p[1] = INT_MIN; }},
        {5, "a position far behind", [](Job&, Segment&, Ints&, Ints& p, Ints&) { p[1] = INT_MAX; }},
        {5, "a chain with a gap", [](Job&, Segment&, Ints&, Ints& p, Ints&) { p[1] = 7; }},
        {7, "a token below", [](Job&, Segment&, Ints& t, Ints&, Ints&) { t[2] = -1; }},
        {7, "a token above", [](Job&, Segment&, Ints& t, Ints&, Ints&) { t[0] = INT_MAX; }},
        {8, "logits twice", [](Job&, Segment&, Ints&, Ints&, Ints& r) { r[1] = 0; }},
        {8, "logits of no row", [](Job&, Segment&, Ints&, Ints&, Ints& r) { r[1] = 3; }},
        {8, "logits before", [](Job&, Segment&, Ints&, Ints&, Ints& r) { r[0] = -1; }},
    };
    Text text(e, 64);
    Ints words{1, 2, 3, 4, 5};
    Part first = chain(text, words, 0, 5);
    forward(e, c, {&first});
    text.commit_first(5);
    Floats hidden(3 * static_cast<size_t>(c.hidden)), logits(2 * static_cast<size_t>(c.vocab));
    for (const Bad& bad : cases) {
        Ints tokens{1, 2, 3}, positions{5, 6, 7}, rows{0, 2};
        Segment segment{text.cache, 0, 3, nullptr};
        Job job{tokens.data(), positions.data(), &segment, 1, 3, hidden.data(), rows.data(), 2, logits.data(), nullptr};
        check(entmtp_forward(e, &job) == 0, "the job before it is spoiled");
        bad.spoil(job, segment, tokens, positions, rows);
        int code = entmtp_forward(e, &job);
        check(code == bad.code, bad.what, code);
    }
    int many = kBlockRows + 1;
    Ints tokens(many, 1), positions;
    std::vector<uint8_t> mask(static_cast<size_t>(many) * many, 1);
    for (int i = 0; i < many; i++) positions.push_back(5 + i);
    Segment segment{text.cache, 0, many, mask.data()};
    Job job{tokens.data(), positions.data(), &segment, 1, many, nullptr, nullptr, 0, nullptr, nullptr};
    check(entmtp_forward(e, &job) == 3, "a tree beyond a block");
    segment.mask = nullptr;
    check(entmtp_forward(e, &job) == 4, "more rows than fit");
    Text full(e, c.max_positions + 64);
    for (int at = 0; at < c.max_positions; at += 100) {
        Ints some(std::min(100, c.max_positions - at), 1);
        Part p = chain(full, some, 0, some.size());
        forward(e, c, {&p}, false);
        full.commit_first(static_cast<int>(some.size()));
    }
    Ints one{1}, end{c.max_positions};
    Segment last{full.cache, 0, 1, nullptr};
    job = {one.data(), end.data(), &last, 1, 1, nullptr, nullptr, 0, nullptr, nullptr};
    check(entmtp_forward(e, &job) == 6, "a position behind the last");
    // masks that no tree has give no sense, but no harm either
    for (int seed = 0; seed < 4; seed++) {
        std::mt19937 rng(seed);
        Part p{&text, random_tokens(rng, 20, c.vocab), {}, {}};
        for (int i = 0; i < 20; i++) p.depths.push_back(static_cast<int>(rng() % 20));
        for (int i = 0; i < 400; i++) p.mask.push_back(seed ? rng() % 2 : 0);
        forward(e, c, {&p});
    }
    Ints falling{1, 0}, negative{-1}, beyond{64};
    check(entmtp_cache_commit(e, text.cache, falling.data(), 2) == 1, "commit of falling rows");
    check(entmtp_cache_commit(e, text.cache, negative.data(), 1) == 1, "commit of row -1");
    check(entmtp_cache_commit(e, text.cache, beyond.data(), 1) == 1, "commit of a row beyond the cache");
    check(entmtp_cache_truncate(text.cache, 6) == 1 && entmtp_cache_truncate(text.cache, -1) == 1, "a cut beyond the rows");
    check(text.length() == 5, "a refused commit changed the length");
}

// A matrix of a drafter, wider than all of the model: its rows alone and together.
void linear(Engine* e, const char* isa, bool has_bias) {
    const int channels = 70, k = 688, n = 150;
    std::mt19937 rng(11);
    std::normal_distribution<float> normal;
    Floats weight(static_cast<size_t>(channels) * k), bias(channels), rows(static_cast<size_t>(n) * k);
    for (Floats* v : {&weight, &bias, &rows}) for (float& x : *v) x = normal(rng);
    std::vector<uint8_t> packed(entmtp_packed_bytes(channels, k));
    check(entmtp_pack(isa, weight.data(), channels, k, packed.data()) == 0, "pack");
    Linear* l = entmtp_linear_new(packed.data(), has_bias ? bias.data() : nullptr, channels, k);
    check(l, "linear");
    Floats all(static_cast<size_t>(n) * channels), some(3 * channels);
    check(entmtp_linear_run(e, l, rows.data(), n, all.data()) == 0, "product");
    check(entmtp_linear_run(e, l, rows.data(), 0, nullptr) == 0, "product of no rows");
    check(entmtp_linear_run(e, l, rows.data(), -1, nullptr) == 1, "product of -1 rows");
    for (int r = 0; r + 3 <= n; r += 7) {
        check(entmtp_linear_run(e, l, rows.data() + static_cast<size_t>(r) * k, 3, some.data()) == 0, "product of three rows");
        check(memcmp(some.data(), all.data() + static_cast<size_t>(r) * channels, some.size() * sizeof(float)) == 0, "a row of a product", r);
    }
    entmtp_linear_free(l);
}

void run(const char* isa, const Config& c, bool is_shared, Out& first) {
    Weighted weighted(c, isa);
    std::mt19937 rng(3);
    Ints tokens = random_tokens(rng, 140, c.vocab);
    Engine* plain = entmtp_model_new(&c, &weighted.w, 1, isa);
    check(plain && entmtp_model_bytes(plain) > 0, "model");
    check(!entmtp_model_new(&c, &weighted.w, 0, isa) && !entmtp_model_new(&c, &weighted.w, kMaxThreads + 1, isa), "threads out of range");
    Out alone;
    {
        Text text(plain, 1);
        alone = one_by_one(plain, c, text, tokens);
    }
    if (first.hidden.empty()) first = alone;
    for (size_t i = 0; i < tokens.size(); i++) equal(c, alone, i, first, i, "instruction sets");
    Engine* e = entmtp_model_new(&c, &weighted.w, 3, isa);
    check(e, "model");
    for (int threads = 3; threads >= (is_shared ? 2 : 1); threads--) {
        check(entmtp_model_threads(e, threads) == 0, "threads");
        check(entmtp_model_threads(e, 0) == 1 && entmtp_model_threads(e, kMaxThreads + 1) == 1, "threads out of range");
        chunks(e, c, tokens, alone, is_shared);
        trees(e, plain, c, tokens, threads * 5, 36);
        if (threads > 1) trees(e, plain, c, tokens, 124 + threads, threads == 2 ? 128 : 24);
        linear(e, isa, threads != 2);
        if (!is_shared) bad_jobs(e, c);
    }
    entmtp_model_free(e), entmtp_model_free(plain);
}

// Words alone and in a row, and the ids that can win: every array has exactly its size.
void noise(const char* isa) {
    std::mt19937 rng(17);
    std::normal_distribution<float> normal;
    for (int count : {0, 1, 3, 4, 5, 255, 256, 257, 1030}) {
        std::vector<uint32_t> words(count), longer(count + 5), chosen(count);
        Ints ids(count);
        Floats scores(count), kept(count);
        check(entmtp_noise_words(isa, ~0ull, 1ull << 40, count, words.data()) == 0, "words");
        check(entmtp_noise_words(isa, ~0ull, 1ull << 40, count + 5, longer.data()) == 0, "words");
        check(std::equal(words.begin(), words.end(), longer.begin()), "words of a longer row", count);
        for (float scale : {0.f, 1.f, 1e30f, INFINITY, NAN}) {
            for (float& x : scores) x = scale * normal(rng);
            for (float temperature : {0.f, .7f})
                for (const uint32_t* known : {(const uint32_t*)nullptr, (const uint32_t*)words.data()}) {
                    const Draw draw{~0ull, 1ull << 40, scores.data(), count, temperature, known, ids.data(), chosen.data(), kept.data()};
                    int found = entmtp_noise_candidates(isa, &draw);
                    if (temperature && count && !std::isfinite(scale)) { check(found == -2, "odd logits", found); continue; }
                    check(found >= (count > 0) && found <= count, "ids", found);
                    for (int i = 0; i < found; i++) check(chosen[i] == words[ids[i]] && (!i || ids[i] > ids[i - 1]), "an id", i);
                    for (int i = 0; i < found && !temperature; i++) check(!memcmp(&kept[i], &scores[ids[i]], 4), "a score", i);
                }
        }
    }
    check(entmtp_noise_words(isa, 0, 0, -1, nullptr) == 1, "-1 words");
    const Draw none{0, 0, nullptr, -1, 0, nullptr, nullptr, nullptr, nullptr}, cold{0, 0, nullptr, 0, -1, nullptr, nullptr, nullptr, nullptr};
    check(entmtp_noise_candidates(isa, &none) == -1, "-1 scores");
    check(entmtp_noise_candidates(isa, &cold) == -1, "a temperature below 0");
    check(entmtp_noise_candidates(isa, nullptr) == -1, "no row");
}

} // namespace

int main(int argc, char** argv) {
    bool is_shared = argc > 1 && strcmp(argv[1], "shared") == 0;
    check(entmtp_abi() == 5, "abi");
    check(!entmtp_isa_supported("sse9"), "an unknown instruction set");
    float rows[16 * 33] = {};
    std::vector<uint8_t> panels(entmtp_packed_bytes(33, 16));
    rows[0] = 1e-40f;  // has no scale
    check(entmtp_pack("portable", rows, 33, 16, panels.data()) == 0, "pack of a tiny value");
    for (float odd : {INFINITY, -INFINITY, NAN}) {
        rows[17] = odd, rows[18] = 1;
        check(entmtp_pack("portable", rows, 33, 16, panels.data()) == 2, "pack of a value that is not finite");
    }
    check(entmtp_pack("portable", rows, 1, 15, panels.data()) == 1, "pack of 15 columns");
    check(entmtp_noise_words("sse9", 0, 0, 0, nullptr) == 1, "words of an unknown instruction set");
    for (const char* isa : {"avx512", "avx2", "portable"}) if (entmtp_isa_supported(isa)) noise(isa);
    //             layers hidden heads kv dim inter vocab positions | biases, norm | mix odd | eps
    const Config grouped{2, 96, 4, 2, 32, 32, 1030, 270, 0, 0, 0, 0, 2, 3, 1e-6f};
    const Config biased{1, 32, 5, 1, 96, 64, 75, 270, 1, 1, 1, 1, 4, 1, 1e-5f};
    for (const Config& c : {grouped, biased}) {
        Out first;
        for (const char* isa : {"avx512", "avx2", "portable"}) {
            if (!entmtp_isa_supported(isa) || (is_shared && !first.hidden.empty())) continue;
            run(isa, c, is_shared, first);
            printf("%s, hidden size %d: %d rows compared so far\n", isa, c.hidden, num_compared), fflush(stdout);
        }
    }
    puts("OK");
}
