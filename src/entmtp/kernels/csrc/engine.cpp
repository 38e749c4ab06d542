// Memory and threads behind the C interface.
#include "engine.h"
#include <algorithm>
#include <system_error>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace entmtp {
namespace {

constexpr uint64_t kOpen = uint64_t(1) << 31, kCount = kOpen - 1;

void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

} // namespace

Buffer::Buffer(size_t size) {
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

// ---------------------------------------------------------------- threads

// A worker joins a run that is open and that it has not seen; one that comes late finds it
// closed and is not waited for.
bool Pool::enter(uint64_t& seen) {
    uint64_t gate = gate_.load(std::memory_order_acquire);
    while ((gate & kOpen) && gate >> 32 != seen)
        if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
            seen = gate >> 32;
            return true;
        }
    return false;
}

// Spins for a while after a run, since the next one of a decode comes at once; then sleeps.
void Pool::work(int thread) {
    uint64_t seen = 0;
    for (;;) {
        uint32_t calls = calls_.load(std::memory_order_acquire);
        bool is_in = false;
        for (int spin = 0; spin < 20000 && !(is_in = enter(seen)) && !is_closing_; spin++) pause_cpu();
        if (is_closing_) return;
        if (!is_in) {
            if ((is_in = enter(seen)) == false) { calls_.wait(calls); continue; }
        }
        isa_->run(*model_, thread);
        gate_.fetch_sub(1, std::memory_order_release);
    }
}

void Pool::run(Model& m) {
    for (int i = 0; i < m.num_phases; i++) {
        m.phases[i].done.store(0, std::memory_order_relaxed);
        for (int t = 0; t < m.threads; t++) m.claims[size_t(t) * m.claim_stride + i].store(0, std::memory_order_relaxed);
    }
    if (workers_.empty()) return isa_->run(m, 0);
    model_ = &m;
    uint64_t generation = (gate_.load(std::memory_order_relaxed) >> 32) + 1;
    gate_.store(generation << 32 | kOpen, std::memory_order_release);
    calls_.fetch_add(1, std::memory_order_release);
    calls_.notify_all();
    isa_->run(m, 0);
    gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spin = 0; gate_.load(std::memory_order_acquire) & kCount; spin++)
        if (spin < 2000) pause_cpu(); else std::this_thread::yield();
}

void Pool::stop() {
    is_closing_ = true;
    calls_.fetch_add(1);
    calls_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    is_closing_ = false;
}

// Any number of threads does all the work, so where the system grants fewer, these have to do.
void Pool::start(int threads) {
    stop();
    threads_ = threads;
    try {
        for (int t = 1; t < threads; t++) workers_.emplace_back(&Pool::work, this, t);
    } catch (const std::system_error&) {}
}

// ---------------------------------------------------------------- memory

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

void make_scores(Engine& e, int pending, int threads) {
    int stride = kSpan + std::max(kBlockRows, (pending + 15) / 16 * 16) + 64;
    if (stride <= e.score_stride && threads <= e.score_threads) return;
    stride = std::max(stride, e.score_stride), threads = std::max(threads, e.score_threads);
    std::vector<Buffer> buffers;
    for (int t = 0; t < threads; t++) buffers.emplace_back(size_t(8) * stride * sizeof(float));
    e.score_buffers = std::move(buffers);  // nothing fails from here on
    e.score_stride = stride, e.score_threads = threads;
    for (int t = 0; t < threads; t++) e.scratch[t].scores = e.score_buffers[t].as<float>();
}

void fit_threads(Engine& e, int threads) {
    for (; e.num_scratch < threads; e.num_scratch++) {
        float* row = e.make<float>(e.longest);
        float* logits = e.is_draft ? nullptr : e.make<float>(size_t(kBlockRows) * kVocabChunk);
        e.scratch[e.num_scratch].row = row, e.scratch[e.num_scratch].logits = logits;
    }
    Buffer claims(size_t(threads) * e.claim_stride * sizeof(std::atomic<int32_t>));
    make_rows(e, std::max(e.longest_row, e.longest), threads);
    if (e.c.layers) make_scores(e, 0, threads);
    e.claims_buffer = std::move(claims);
    e.claims = e.claims_buffer.as<std::atomic<int32_t>>();
    e.threads = threads;
}

void allocate(Engine& e, int num_phases) {
    const Config& c = e.c;
    size_t width = static_cast<size_t>(c.heads) * c.head_dim;
    size_t qkv = static_cast<size_t>(c.heads + 2 * c.kv_heads) * c.head_dim;
    e.x = e.make<float>(kBlockRows * static_cast<size_t>(c.hidden));
    e.q = e.make<float>(kBlockRows * width);
    e.h = e.make<float>(kBlockRows * std::max({static_cast<size_t>(c.hidden), static_cast<size_t>(c.inter), qkv}));
    if (!e.is_draft)
        e.vocab_parts = e.make<Partial>(kBlockRows * static_cast<size_t>((c.vocab + kVocabChunk - 1) / kVocabChunk));
    e.num_phases = num_phases;
    e.phases = e.make<Phase>(e.num_phases);
    e.claim_stride = (e.num_phases + 15) / 16 * 16;  // no line shared by two threads
}

void run(Engine& e) {
    if (e.threads != e.pool->threads()) fit_threads(e, e.pool->threads());
    e.pool->run(e);
}

} // namespace entmtp
