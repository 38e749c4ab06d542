// The C interface: models, drafters' blocks, caches, forwards, packing.
#include "engine.h"
#include <algorithm>
#include <cmath>

namespace entmtp {
namespace {

constexpr size_t kPartsBudget = size_t(64) << 20;
constexpr int kMinBlockRows = 8;

int longest_row(const Config& c) { return std::max({c.hidden, c.inter, c.heads * c.head_dim}); }

// Room for the sums of every span that a row of this forward may have.
void make_parts(Engine& e, int spans, int rows) {
    size_t size = size_t(rows) * e.c.heads * spans * (e.c.head_dim + 16) * sizeof(float);
    if (size > e.parts_buffer.size()) e.parts_buffer = Buffer(size);
    e.parts = e.parts_buffer.as<float>();
    e.max_spans = spans;
}

int check_segment(const Engine& e, const Job& j, const Segment& s) {
    int most = j.inputs ? kMaxPending : kBlockRows;
    if (s.held < 0 || s.held > most || (s.held && (!s.mask || !s.held_positions))) return 3;
    if (s.mask && s.num_rows > most - s.held) return 3;
    if (s.num_rows > s.cache->capacity - s.cache->length - s.held) return 4;
    for (int i = 0; i < s.held; i++) {
        int64_t depth = int64_t(s.held_positions[i]) - s.cache->length;
        if (depth < 0 || depth >= s.held || s.held_positions[i] >= e.c.max_positions) return 5;
    }
    for (int r = 0; r < s.num_rows; r++) {
        int row = s.first_row + r;
        int64_t depth = int64_t(j.positions[row]) - s.cache->length;
        if (depth < 0 || depth >= s.held + s.num_rows || (!s.mask && depth != r)) return 5;
        if (j.positions[row] >= e.c.max_positions) return 6;
        if (j.tokens && (j.tokens[row] < 0 || j.tokens[row] >= e.vocabulary.tokens)) return 7;
    }
    return 0;
}

int check_job(const Engine& e, const Job& j) {
    if (j.num_rows < 1 || j.num_segments < 1) return 1;
    bool reads_tokens = !e.is_draft || e.front.join.panels;
    if (!e.c.layers || e.is_draft != (j.inputs != nullptr) || (reads_tokens && !j.tokens)) return 10;
    int next = 0;
    for (int i = 0; i < j.num_segments; i++) {
        const Segment& s = j.segments[i];
        if (!s.cache || s.first_row != next || s.num_rows < 1 || s.num_rows > j.num_rows - next) return 2;
        if (int error = check_segment(e, j, s)) return error;
        next += s.num_rows;
    }
    if (next != j.num_rows) return 2;
    for (int i = 0; i < j.num_logit_rows; i++)
        if (j.logit_rows[i] < (i ? j.logit_rows[i - 1] + 1 : 0) || j.logit_rows[i] >= j.num_rows) return 8;
    return e.is_draft && j.num_logit_rows ? check_ranking(e, j.ranking) : 0;
}

// Rows that go through the layers together: as many as fit; a masked segment that
// fits into a block is not cut.
int block_end(const Job& j, int first, int limit) {
    int end = first;
    for (int i = 0; i < j.num_segments; i++) {
        const Segment& s = j.segments[i];
        int stop = s.first_row + s.num_rows;
        if (stop <= first) continue;
        if (s.mask && s.num_rows <= kBlockRows) {
            if (stop - first > limit && end > first) return end;
            end = stop;
        } else {
            end = stop - first < limit ? stop : first + limit;
            if (end < stop) return end;
        }
        if (end - first >= limit) return end;
    }
    return end;
}

void add_layer(Engine& e, WeightStream& stream, const EntmtpLayer& from) {
    const Config& c = e.c;
    const int width = c.heads * c.head_dim, heads = (c.heads + 2 * c.kv_heads) * c.head_dim;
    Layer to{};
    to.qkv = stream.add(from.qkv, heads, c.hidden);
    to.o = stream.add(from.o, c.hidden, width);
    to.gate_up = stream.add(from.gate_up, 2 * c.inter, c.hidden);
    to.down = stream.add(from.down, c.hidden, c.inter);
    to.qkv_bias = e.copy(from.qkv_bias, heads);
    to.o_bias = e.copy(from.o_bias, c.hidden);
    to.gate_up_bias = e.copy(from.gate_up_bias, size_t(2) * c.inter);
    to.down_bias = e.copy(from.down_bias, c.hidden);
    to.q_norm = e.copy(from.q_norm, c.head_dim);
    to.k_norm = e.copy(from.k_norm, c.head_dim);
    e.layer_list.push_back(to);
}

size_t layer_room(const Config& c) {
    const int width = c.heads * c.head_dim, heads = (c.heads + 2 * c.kv_heads) * c.head_dim;
    return WeightStream::room(heads, c.hidden) + WeightStream::room(c.hidden, width) +
           WeightStream::room(2 * c.inter, c.hidden) + WeightStream::room(c.hidden, c.inter);
}

// What a target and a drafter's block have in common.
void fill(Engine& e, const Config& config, const EntmtpWeights& w, const EntmtpFront* front) {
    e.c = config;
    const Config& c = e.c;
    const uint8_t* join = front ? front->join : nullptr;
    WeightStream stream(e, (join ? WeightStream::room(c.hidden, 2 * c.hidden) : 0) + c.layers * layer_room(c) +
                               WeightStream::room(c.vocab, c.hidden));
    if (join) e.front.join = stream.add(join, c.hidden, 2 * c.hidden);
    for (int l = 0; l < c.layers; l++) add_layer(e, stream, w.layers[l]);
    e.w.layers = e.layer_list.data();
    if (w.head) e.w.head = stream.add(w.head, c.vocab, c.hidden);
    e.w.embedding = e.copy(w.embedding, static_cast<size_t>(c.vocab) * c.hidden);
    e.w.dense = e.copy(w.dense, static_cast<size_t>(c.odd) * c.odd);
    e.w.final_norm = e.copy(w.final_norm, c.hidden);
    size_t table = static_cast<size_t>(c.max_positions) * (c.head_dim / 2);
    e.w.cos = e.copy(w.cos, table), e.w.sin = e.copy(w.sin, table);
    e.longest = std::max(longest_row(c), join ? 2 * c.hidden : 0);
    allocate(e, c.layers * 10 + 8);
}

} // namespace
} // namespace entmtp

using namespace entmtp;

extern "C" {

int entmtp_abi() { return 5; }

int entmtp_isa_supported(const char* name) { return is_supported(isa_named(name)); }

int entmtp_isa_layout(const char* name) { const Isa* isa = isa_named(name); return isa ? isa->layout : 0; }

// Quantises `channels` rows of k floats, symmetric, one scale a channel, and packs them. `out` has
// room for whole panels of 32 channels; channels that are missing become zero.
int entmtp_pack(const char* name, const float* rows, int channels, int k, uint8_t* out) {
    const Isa* isa = isa_named(name);
    if (!isa || k < 1 || k % 16) return 1;
    std::vector<int8_t> ints(static_cast<size_t>(kPanel) * k);
    for (int p = 0; p * kPanel < channels; p++, out += panel_bytes(k)) {
        auto* scale = reinterpret_cast<float*>(out);
        auto* offset = reinterpret_cast<int32_t*>(out + kPanel * 4);
        for (int c = 0; c < kPanel; c++) {
            int8_t* to = ints.data() + static_cast<size_t>(c) * k;
            int channel = p * kPanel + c, sum = 0;
            scale[c] = 0, offset[c] = 0;
            memset(to, 0, k);
            if (channel >= channels) continue;
            const float* row = rows + static_cast<size_t>(channel) * k;
            float max = 0;
            for (int i = 0; i < k; i++) {
                if (!std::isfinite(row[i])) return 2;
                max = fabsf(row[i]) > max ? fabsf(row[i]) : max;
            }
            if (!(max > 0)) continue;
            for (int i = 0; i < k; i++) sum += to[i] = static_cast<int8_t>(lrintf(row[i] * (127.f / max)));
            scale[c] = max / 127.f, offset[c] = -128 * sum;
        }
        isa->pack(ints.data(), k, out);
    }
    return 0;
}

size_t entmtp_packed_bytes(int channels, int k) { return static_cast<size_t>((channels + kPanel - 1) / kPanel) * panel_bytes(k); }

Engine* entmtp_model_new(const Config* config, const EntmtpWeights* w, int threads, const char* name) try {
    const Isa* isa = isa_named(name);
    if (!is_supported(isa) || threads < 1 || threads > kMaxThreads) return nullptr;
    auto e = std::make_unique<Engine>();
    e->isa = isa;
    e->vocabulary.tokens = config->vocab;
    fill(*e, *config, *w, nullptr);
    e->own_pool = std::make_unique<Pool>(isa);
    e->pool = e->own_pool.get();
    fit_threads(*e, threads);
    e->pool->start(threads);
    return e.release();
} catch (const std::bad_alloc&) { return nullptr; }

// A block of a drafter, which reads rows instead of tokens alone. It computes on the threads of its
// target, which must outlive it.
Engine* entmtp_block_new(Engine* target, const Config* config, const EntmtpWeights* w, const EntmtpFront* front) try {
    auto e = std::make_unique<Engine>();
    e->isa = target->isa, e->pool = target->pool, e->is_draft = true;
    if (front->join && !front->vocabulary.embedding) return nullptr;
    if (!take_vocabulary(*e, front->vocabulary) || (w->head ? front->vocabulary.columns : 0) != config->vocab) return nullptr;
    fill(*e, *config, *w, front);
    e->front.hidden_first = front->hidden_first;
    e->output_bias = e->copy(front->output_bias, config->vocab);
    fit_threads(*e, target->pool->threads());
    return e.release();
} catch (const std::bad_alloc&) { return nullptr; }

void entmtp_model_free(Engine* e) {
    e->own_pool.reset();
    delete e;
}

// Changes the number of threads, between forwards.
int entmtp_model_threads(Engine* e, int threads) try {
    if (threads < 1 || threads > kMaxThreads || !e->own_pool) return 1;
    if (threads == e->threads) return 0;
    fit_threads(*e, threads);
    e->pool->start(threads);
    return 0;
} catch (const std::bad_alloc&) { return -1; }

Cache* entmtp_cache_new(const Engine* e, int capacity) try {
    capacity = (capacity + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
    size_t count = static_cast<size_t>(e->c.layers) * e->c.kv_heads * capacity * e->c.head_dim;
    Buffer keys(count * sizeof(half_t)), values(count * sizeof(half_t));
    auto* cache = new Cache{capacity, 0, keys.as<half_t>(), values.as<half_t>()};
    new (&keys) Buffer(), new (&values) Buffer();  // the cache owns the memory now
    return cache;
} catch (const std::bad_alloc&) { return nullptr; }

void entmtp_cache_free(Cache* cache) {
    free(cache->keys), free(cache->values);
    delete cache;
}

int entmtp_cache_length(const Cache* cache) { return cache->length; }
int entmtp_cache_capacity(const Cache* cache) { return cache->capacity; }

// Moves the committed rows to a cache with more room; the old one is freed.
Cache* entmtp_cache_grow(const Engine* e, Cache* old, int capacity) {
    Cache* cache = entmtp_cache_new(e, capacity);
    if (!cache) return nullptr;
    size_t heads = static_cast<size_t>(e->c.layers) * e->c.kv_heads, dim = e->c.head_dim;
    size_t rows = (old->length + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
    for (size_t h = 0; h < heads; h++) {
        memcpy(cache->keys + h * cache->capacity * dim, old->keys + h * old->capacity * dim, rows * dim * sizeof(half_t));
        memcpy(cache->values + h * cache->capacity * dim, old->values + h * old->capacity * dim, rows * dim * sizeof(half_t));
    }
    cache->length = old->length;
    entmtp_cache_free(old);
    return cache;
}

// Keeps rows of the last forward, increasing, behind the committed ones.
int entmtp_cache_commit(const Engine* e, Cache* cache, const int32_t* rows, int count) {
    size_t heads = static_cast<size_t>(e->c.layers) * e->c.kv_heads, dim = e->c.head_dim;
    if (cache->length + count > cache->capacity) return 1;
    for (int i = 0; i < count; i++) {
        if (rows[i] < (i ? rows[i - 1] + 1 : 0) || cache->length + rows[i] >= cache->capacity) return 1;
        size_t from = cache->length + rows[i], to = cache->length + i;
        if (from == to) continue;
        for (size_t h = 0; h < heads; h++) {
            half_t *keys = cache->keys + h * cache->capacity * dim, *values = cache->values + h * cache->capacity * dim;
            half_t* key_from = keys + from / kKeyBlock * kKeyBlock * dim + from % kKeyBlock;
            half_t* key_to = keys + to / kKeyBlock * kKeyBlock * dim + to % kKeyBlock;
            for (size_t d = 0; d < dim; d++) key_to[d * kKeyBlock] = key_from[d * kKeyBlock];
            memcpy(values + to * dim, values + from * dim, dim * sizeof(half_t));
        }
    }
    cache->length += count;
    return 0;
}

// Forgets the committed rows from `length` on.
int entmtp_cache_truncate(Cache* cache, int length) {
    if (length < 0 || length > cache->length) return 1;
    cache->length = length;
    return 0;
}

int entmtp_forward(Engine* e, const Job* job) try {
    if (int error = check_job(*e, *job)) return error;
    e->job = *job;
    int reach = 0, pending = 0;
    for (int r = 0; r < job->num_rows; r++) reach = std::max(reach, job->positions[r]);
    for (int i = 0; i < job->num_segments; i++)
        if (job->segments[i].mask) pending = std::max(pending, job->segments[i].held + job->segments[i].num_rows);
    make_scores(*e, pending, e->threads);
    if (e->is_draft) make_ranked(*e, job->ranking, job->num_logit_rows);
    int spans = reach / kSpan + 1;
    size_t row_bytes = size_t(e->c.heads) * spans * (e->c.head_dim + 16) * sizeof(float);
    int limit = static_cast<int>(std::min<size_t>(kBlockRows, std::max<size_t>(kMinBlockRows, kPartsBudget / row_bytes)));
    for (int first = 0; first < job->num_rows;) {
        int end = block_end(*job, first, limit);
        make_parts(*e, spans, end - first);
        e->block_first = first, e->block_rows = end - first;
        run(*e);
        first = end;
    }
    return 0;
} catch (const std::bad_alloc&) { return -1; }

size_t entmtp_model_bytes(const Engine* e) { size_t n = 0; for (const auto& b : e->buffers) n += b.size(); return n; }

} // extern "C"
