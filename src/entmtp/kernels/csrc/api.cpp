// The C interface: models, caches, forwards, packing; and the threads behind them.
#include "core.h"
#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdlib.h>
#include <string.h>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace entmtp {
namespace {

constexpr size_t kHeader = 256;
constexpr size_t kPartsBudget = size_t(64) << 20;
constexpr int kMinBlockRows = 8;

void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Memory in large pages where the system grants them: a forward streams all weights, and small
// pages cost a lookup each and stop the hardware's prefetching.
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(size_t size) {
        constexpr size_t page = size_t(2) << 20;
        size_ = size;
        size_t align = size >= page ? page : 64, room = (size + align - 1) / align * align;
        data_ = static_cast<uint8_t*>(aligned_alloc(align, room ? room : align));
        if (!data_) throw std::bad_alloc();
#if defined(__linux__)
        if (align == page) madvise(data_, room, MADV_HUGEPAGE);
#endif
        memset(data_, 0, room);
    }
    Buffer(Buffer&& o) noexcept : data_(o.data_), size_(o.size_) { o.data_ = nullptr; o.size_ = 0; }
    Buffer& operator=(Buffer&& o) noexcept { std::swap(data_, o.data_); std::swap(size_, o.size_); return *this; }
    ~Buffer() { free(data_); }
    template <class T> T* as() const { return reinterpret_cast<T*>(data_); }
    size_t size() const { return size_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

const Isa* isa_named(const char* name) {
    for (const Isa* isa : {&kPortable, &kAvx2, &kAvx512})
        if (isa->run && strcmp(isa->name, name) == 0) return isa;
    return nullptr;
}

bool is_supported(const Isa* isa) {
    if (!isa || !isa->run) return false;
#if defined(__x86_64__)
    __builtin_cpu_init();
#if defined(ENTMTP_EMULATE_AVX512)
    if (isa == &kAvx512) return true;
#endif
    if (isa == &kAvx512)
        return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (isa == &kAvx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
    return isa == &kPortable;
}

struct Engine : Model {
    const Isa* isa;
    std::vector<Layer> layer_list;
    std::vector<Buffer> buffers;
    Buffer parts_buffer, claims_buffer;
    std::vector<Buffer> row_buffers;
    int longest_row = 0, row_threads = 0, num_scratch = 0;
    std::vector<std::thread> pool;
    // Generation in the high half, open flag, and the number of workers inside.
    std::atomic<uint64_t> gate{0};
    std::atomic<uint32_t> calls{0};
    std::atomic<bool> is_closing{false};

    template <class T> T* make(size_t count) {
        buffers.emplace_back(count * sizeof(T));
        return buffers.back().as<T>();
    }
};

struct Linear {
    Buffer packed;
    std::vector<float> bias;
    Product product{};
};

constexpr uint64_t kOpen = uint64_t(1) << 31, kCount = kOpen - 1;

// A worker joins a forward that is open and that it has not seen; one that comes late finds it
// closed and is not waited for.
bool enter(Engine& e, uint64_t& seen) {
    uint64_t gate = e.gate.load(std::memory_order_acquire);
    while ((gate & kOpen) && gate >> 32 != seen)
        if (e.gate.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
            seen = gate >> 32;
            return true;
        }
    return false;
}

// Spins for a while after a forward, since the next one of a decode comes at once; then sleeps.
void worker(Engine* e, int thread) {
    uint64_t seen = 0;
    for (;;) {
        uint32_t calls = e->calls.load(std::memory_order_acquire);
        bool is_in = false;
        for (int spin = 0; spin < 20000 && !(is_in = enter(*e, seen)) && !e->is_closing; spin++) pause_cpu();
        if (e->is_closing) return;
        if (!is_in) {
            if ((is_in = enter(*e, seen)) == false) { e->calls.wait(calls); continue; }
        }
        e->isa->run(*e, thread);
        e->gate.fetch_sub(1, std::memory_order_release);
    }
}

void run_block(Engine& e) {
    for (int i = 0; i < e.num_phases; i++) {
        e.phases[i].done.store(0, std::memory_order_relaxed);
        for (int t = 0; t < e.threads; t++) e.claims[size_t(t) * e.claim_stride + i].store(0, std::memory_order_relaxed);
    }
    if (e.pool.empty()) return e.isa->run(e, 0);
    uint64_t generation = (e.gate.load(std::memory_order_relaxed) >> 32) + 1;
    e.gate.store(generation << 32 | kOpen, std::memory_order_release);
    e.calls.fetch_add(1, std::memory_order_release);
    e.calls.notify_all();
    e.isa->run(e, 0);
    e.gate.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spin = 0; e.gate.load(std::memory_order_acquire) & kCount; spin++)
        if (spin < 2000) pause_cpu(); else std::this_thread::yield();
}

size_t panel_bytes(int k) { return kHeader + static_cast<size_t>(k) * kPanel; }

// All weights of a model in one stretch of memory, in the order of their use.
class WeightStream {
public:
    WeightStream(Engine& e, size_t size) : at_(e.make<uint8_t>(size)) {}
    static size_t room(int channels, int k) { return (channels + kPanel - 1) / kPanel * panel_bytes(k); }
    Matrix add(const uint8_t* from, int channels, int k) {
        Matrix m{at_, (channels + kPanel - 1) / kPanel, k};
        memcpy(at_, from, room(channels, k));
        at_ += room(channels, k);
        return m;
    }

private:
    uint8_t* at_;
};

// Room for quantised rows of so many values, shared and for each thread.
void make_rows(Engine& e, int longest, int threads) {
    if (longest <= e.longest_row && threads <= e.row_threads) return;
    longest = std::max(longest, e.longest_row), threads = std::max(threads, e.row_threads);
    std::vector<Buffer> buffers;
    for (int i = 0; i <= threads; i++) {
        buffers.emplace_back(kBlockRows * static_cast<size_t>(longest) * e.isa->act_bytes);
        buffers.emplace_back(kBlockRows * sizeof(float));
    }
    e.row_buffers = std::move(buffers);  // nothing fails from here on
    e.longest_row = longest, e.row_threads = threads;
    for (int i = 0; i <= threads; i++)
        (i ? e.scratch[i - 1].rows : e.rows) = {e.row_buffers[2 * i].as<uint8_t>(), e.row_buffers[2 * i + 1].as<float>()};
}

size_t longest_row(const Config& c) {
    return std::max({static_cast<size_t>(c.hidden), static_cast<size_t>(c.inter), static_cast<size_t>(c.heads) * c.head_dim});
}

void stop_threads(Engine& e) {
    e.is_closing = true;
    e.calls.fetch_add(1);
    e.calls.notify_all();
    for (auto& thread : e.pool) thread.join();
    e.pool.clear();
    e.is_closing = false;
}

// Starts the workers; this thread is the first one. Any number of them does all the work, so where
// the system grants fewer, these have to do.
void start_threads(Engine& e, int threads) {
    stop_threads(e);
    for (int t = e.num_scratch; t < threads; t++, e.num_scratch++)
        e.scratch[t] = Scratch{{}, e.make<float>(longest_row(e.c)), e.make<float>(8 * (kSpan + kBlockRows + 64)),
                               e.make<float>(size_t(kBlockRows) * kVocabChunk)};
    Buffer claims(size_t(threads) * e.claim_stride * sizeof(std::atomic<int32_t>));
    make_rows(e, std::max(e.longest_row, static_cast<int>(longest_row(e.c))), threads);
    e.claims_buffer = std::move(claims);
    e.claims = e.claims_buffer.as<std::atomic<int32_t>>();
    e.threads = threads;
    try {
        for (int t = 1; t < threads; t++) e.pool.emplace_back(worker, &e, t);
    } catch (const std::system_error&) {}
}

void allocate(Engine& e) {
    const Config& c = e.c;
    size_t width = static_cast<size_t>(c.heads) * c.head_dim;
    size_t qkv = static_cast<size_t>(c.heads + 2 * c.kv_heads) * c.head_dim;
    e.x = e.make<float>(kBlockRows * static_cast<size_t>(c.hidden));
    e.q = e.make<float>(kBlockRows * width);
    e.h = e.make<float>(kBlockRows * std::max(static_cast<size_t>(c.inter), qkv));
    e.vocab_parts = e.make<Partial>(kBlockRows * static_cast<size_t>((c.vocab + kVocabChunk - 1) / kVocabChunk));
    e.num_phases = c.layers * 10 + 8;
    e.phases = e.make<Phase>(e.num_phases);
    e.claim_stride = (e.num_phases + 15) / 16 * 16;  // no line shared by two threads
}

// Room for the sums of every span that a row of this forward may have.
void make_parts(Engine& e, int spans, int rows) {
    size_t size = size_t(rows) * e.c.heads * spans * (e.c.head_dim + 16) * sizeof(float);
    if (size > e.parts_buffer.size()) e.parts_buffer = Buffer(size);
    e.parts = e.parts_buffer.as<float>();
    e.max_spans = spans;
}

int check_job(const Engine& e, const Job& j) {
    if (j.num_rows < 1 || j.num_segments < 1) return 1;
    int next = 0;
    for (int i = 0; i < j.num_segments; i++) {
        const Segment& s = j.segments[i];
        if (!s.cache || s.first_row != next || s.num_rows < 1 || s.num_rows > j.num_rows - next) return 2;
        if (s.mask && s.num_rows > kBlockRows) return 3;
        if (s.num_rows > s.cache->capacity - s.cache->length) return 4;
        next += s.num_rows;
        for (int r = 0; r < s.num_rows; r++) {
            int row = s.first_row + r;
            int64_t depth = int64_t(j.positions[row]) - s.cache->length;
            if (depth < 0 || depth >= s.num_rows || (!s.mask && depth != r)) return 5;
            if (j.positions[row] >= e.c.max_positions) return 6;
            if (j.tokens[row] < 0 || j.tokens[row] >= e.c.vocab) return 7;
        }
    }
    if (next != j.num_rows) return 2;
    for (int i = 0; i < j.num_logit_rows; i++)
        if (j.logit_rows[i] < (i ? j.logit_rows[i - 1] + 1 : 0) || j.logit_rows[i] >= j.num_rows) return 8;
    return 0;
}

// Rows that go through the layers together: as many as fit; a masked segment is not cut.
int block_end(const Job& j, int first, int limit) {
    int end = first;
    for (int i = 0; i < j.num_segments; i++) {
        const Segment& s = j.segments[i];
        int stop = s.first_row + s.num_rows;
        if (stop <= first) continue;
        if (s.mask) {
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

} // namespace
} // namespace entmtp

using namespace entmtp;

extern "C" {

struct EntmtpLayer {
    const uint8_t *qkv, *o, *gate_up, *down;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias, *q_norm, *k_norm;
};

struct EntmtpWeights {
    const EntmtpLayer* layers;
    const uint8_t* head;
    const uint16_t* embedding;
    const float *dense, *final_norm, *cos, *sin;
};

int entmtp_abi() { return 2; }

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
    auto owner = std::make_unique<Engine>();
    Engine* e = owner.get();
    e->c = *config, e->threads = threads, e->isa = isa, e->product = nullptr;
    const Config& c = e->c;
    int width = c.heads * c.head_dim;
    auto floats = [&](const float* from, size_t n) -> const float* {
        if (!from) return nullptr;
        float* to = e->make<float>(n);
        memcpy(to, from, n * sizeof(float));
        return to;
    };
    const int heads = (c.heads + 2 * c.kv_heads) * c.head_dim;
    const size_t layer_size = WeightStream::room(heads, c.hidden) + WeightStream::room(c.hidden, width) +
                              WeightStream::room(2 * c.inter, c.hidden) + WeightStream::room(c.hidden, c.inter);
    WeightStream stream(*e, c.layers * layer_size + WeightStream::room(c.vocab, c.hidden));
    for (int l = 0; l < c.layers; l++) {
        const EntmtpLayer& from = w->layers[l];
        Layer to{};
        to.qkv = stream.add(from.qkv, heads, c.hidden);
        to.o = stream.add(from.o, c.hidden, width);
        to.gate_up = stream.add(from.gate_up, 2 * c.inter, c.hidden);
        to.down = stream.add(from.down, c.hidden, c.inter);
        to.qkv_bias = floats(from.qkv_bias, heads);
        to.o_bias = floats(from.o_bias, c.hidden);
        to.gate_up_bias = floats(from.gate_up_bias, size_t(2) * c.inter);
        to.down_bias = floats(from.down_bias, c.hidden);
        to.q_norm = floats(from.q_norm, c.head_dim);
        to.k_norm = floats(from.k_norm, c.head_dim);
        e->layer_list.push_back(to);
    }
    e->w.layers = e->layer_list.data();
    e->w.head = stream.add(w->head, c.vocab, c.hidden);
    auto* embedding = e->make<half_t>(static_cast<size_t>(c.vocab) * c.hidden);
    memcpy(embedding, w->embedding, static_cast<size_t>(c.vocab) * c.hidden * sizeof(half_t));
    e->w.embedding = embedding;
    e->w.dense = floats(w->dense, static_cast<size_t>(c.odd) * c.odd);
    e->w.final_norm = floats(w->final_norm, c.hidden);
    size_t table = static_cast<size_t>(c.max_positions) * (c.head_dim / 2);
    e->w.cos = floats(w->cos, table), e->w.sin = floats(w->sin, table);
    allocate(*e);
    start_threads(*e, threads);
    return owner.release();
} catch (const std::bad_alloc&) { return nullptr; }

void entmtp_model_free(Engine* e) {
    stop_threads(*e);
    delete e;
}

// Changes the number of threads, between forwards.
int entmtp_model_threads(Engine* e, int threads) try {
    if (threads < 1 || threads > kMaxThreads) return 1;
    if (threads != e->threads) start_threads(*e, threads);
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

int entmtp_forward(Engine* e, const Job* job) try {
    if (int error = check_job(*e, *job)) return error;
    e->job = *job;
    int reach = 0;
    for (int r = 0; r < job->num_rows; r++) reach = std::max(reach, job->positions[r]);
    int spans = reach / kSpan + 1;
    size_t row_bytes = size_t(e->c.heads) * spans * (e->c.head_dim + 16) * sizeof(float);
    int limit = static_cast<int>(std::min<size_t>(kBlockRows, std::max<size_t>(kMinBlockRows, kPartsBudget / row_bytes)));
    for (int first = 0; first < job->num_rows;) {
        int end = block_end(*job, first, limit);
        make_parts(*e, spans, end - first);
        e->block_first = first, e->block_rows = end - first;
        run_block(*e);
        first = end;
    }
    return 0;
} catch (const std::bad_alloc&) { return -1; }

// A matrix of its own, for a drafter: packed by entmtp_pack, its rows at most `longest` wide.
Linear* entmtp_linear_new(const uint8_t* packed, const float* bias, int channels, int k) try {
    auto* linear = new Linear();
    int panels = (channels + kPanel - 1) / kPanel;
    linear->packed = Buffer((panels + 1) * panel_bytes(k));
    memcpy(linear->packed.as<uint8_t>(), packed, panels * panel_bytes(k));
    if (bias) linear->bias.assign(bias, bias + channels);
    linear->product.matrix = {linear->packed.as<uint8_t>(), panels, k};
    linear->product.bias = bias ? linear->bias.data() : nullptr;
    linear->product.channels = channels;
    return linear;
} catch (const std::bad_alloc&) { return nullptr; }

void entmtp_linear_free(Linear* linear) { delete linear; }

// Rows [n][k] to [n][channels].
int entmtp_linear_run(Engine* e, Linear* linear, const float* rows, int n, float* out) {
    Product& p = linear->product;
    if (n < 0) return 1;
    for (int first = 0; first < n; first += kBlockRows) {
        p.num_rows = std::min(n - first, kBlockRows);
        p.rows = rows + static_cast<size_t>(first) * p.matrix.k;
        p.out = out + static_cast<size_t>(first) * p.channels;
        make_rows(*e, p.matrix.k, e->threads);
        e->product = &p;
        run_block(*e);
        e->product = nullptr;
    }
    return 0;
}

// Multiplications a second of all threads with the innermost product, weights and rows in the
// nearest memory: each thread at its median over short windows.
double entmtp_dot_rate(const char* name, int threads, int windows) try {
    const Isa* isa = isa_named(name);
    if (!is_supported(isa) || threads < 1 || threads > kMaxThreads || windows < 1) return 0;
    constexpr int k = 256, repeats = 1000;
    std::vector<double> rates(threads);
    std::vector<Buffer> panels, inputs;
    std::vector<std::vector<double>> windows_of(threads, std::vector<double>(windows));
    for (int t = 0; t < threads; t++) {
        panels.emplace_back(2 * panel_bytes(k));
        inputs.emplace_back(size_t(kBlockRows) * k * isa->act_bytes);
    }
    auto work = [&](int thread) {  // allocates nothing
        auto& found = windows_of[thread];
        for (double& rate : found) {
            auto start = std::chrono::steady_clock::now();
            int64_t count = isa->dot(panels[thread].as<uint8_t>(), inputs[thread].as<uint8_t>(), k, repeats);
            rate = count / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        }
        std::nth_element(found.begin(), found.begin() + windows / 2, found.end());
        rates[thread] = found[windows / 2];
    };
    std::vector<std::thread> others;
    others.reserve(threads);
    try {
        for (int t = 1; t < threads; t++) others.emplace_back(work, t);
    } catch (const std::system_error&) {}  // fewer threads, a lower sum
    work(0);
    for (auto& other : others) other.join();
    double total = 0;
    for (double rate : rates) total += rate;
    return total;
} catch (const std::bad_alloc&) { return 0; }

size_t entmtp_model_bytes(const Engine* e) { size_t n = 0; for (const auto& b : e->buffers) n += b.size(); return n; }

} // extern "C"
