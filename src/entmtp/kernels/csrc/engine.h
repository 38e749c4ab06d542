// A model, a drafter's block or a drafter's heads in memory, and the threads that compute them.
#pragma once
#include "core.h"
#include <stdlib.h>
#include <string.h>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace entmtp {

constexpr size_t kHeader = 256;
constexpr int kMaxEnvelope = 64;     // nodes of an envelope with its root
constexpr int kMaxCopy = 16;         // tokens of a copy
constexpr int kCodes = 64;           // steps in which a probability is read
constexpr float kCodesPerNat = 8.f;

// Memory in large pages where the system grants them: a forward streams all weights, and small
// pages cost a lookup each and stop the hardware's prefetching.
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(size_t size);
    Buffer(Buffer&& o) noexcept : data_(o.data_), size_(o.size_) { o.data_ = nullptr; o.size_ = 0; }
    Buffer& operator=(Buffer&& o) noexcept { std::swap(data_, o.data_); std::swap(size_, o.size_); return *this; }
    ~Buffer() { free(data_); }
    template <class T> T* as() const { return reinterpret_cast<T*>(data_); }
    size_t size() const { return size_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// Threads that run a model together; a target and its drafter share them. The caller is the first.
class Pool {
public:
    explicit Pool(const Isa* isa) : isa_(isa) {}
    ~Pool() { stop(); }
    void start(int threads);  // instead of those that run
    void run(Model& m);
    int threads() const { return threads_; }

private:
    void stop();
    void work(int thread);
    bool enter(uint64_t& seen);

    const Isa* isa_;
    int threads_ = 1;
    std::vector<std::thread> workers_;
    Model* model_ = nullptr;
    // Generation in the high half, open flag, and the number of workers inside.
    std::atomic<uint64_t> gate_{0};
    std::atomic<uint32_t> calls_{0};
    std::atomic<bool> is_closing_{false};
};

struct Engine : Model {
    const Isa* isa = nullptr;
    Pool* pool = nullptr;
    std::unique_ptr<Pool> own_pool;   // of a target
    bool is_draft = false;
    int longest = 0;                  // values of a row that is quantised
    std::vector<Layer> layer_list;
    std::vector<Head> head_list;
    std::vector<std::vector<Biased>> head_blocks;
    std::vector<Buffer> buffers, row_buffers, score_buffers;
    Buffer parts_buffer, claims_buffer, ranked_buffer;
    std::vector<float> features, inputs;  // of the rows of a depth, while a block fills trees
    int longest_row = 0, row_threads = 0, num_scratch = 0, score_threads = 0;

    template <class T> T* make(size_t count) {
        buffers.emplace_back(count * sizeof(T));
        return buffers.back().as<T>();
    }
    template <class T> const T* copy(const T* from, size_t count) {
        if (!from) return nullptr;
        T* to = make<T>(count);
        memcpy(to, from, count * sizeof(T));
        return to;
    }
};

const Isa* isa_named(const char* name);
bool is_supported(const Isa* isa);

inline size_t panel_bytes(int k) { return kHeader + static_cast<size_t>(k) * kPanel; }

// Weights in one stretch of memory, in the order of their use.
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

void allocate(Engine& e, int num_phases);
void make_rows(Engine& e, int longest, int threads);   // room for quantised rows of so many values
void make_scores(Engine& e, int pending, int threads); // for attention over so many pending rows
void fit_threads(Engine& e, int threads);              // whatever each thread needs of its own
void run(Engine& e);                                   // what the model is set to do, on its pool


bool take_vocabulary(Engine& e, const Vocabulary& v);           // false where it makes no sense
int check_ranking(const Engine& e, const Ranking& r);           // 0, or the code of a refusal
void make_ranked(Engine& e, const Ranking& r, int rows);        // room for scores that are only ranked

} // namespace entmtp

// The structures of the C interface that are not plain data of the core.
extern "C" {

struct EntmtpLayer {
    const uint8_t *qkv, *o, *gate_up, *down;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias, *q_norm, *k_norm;
};

// Of a drafter's block, embedding is null, and head where nothing is scored.
struct EntmtpWeights {
    const EntmtpLayer* layers;
    const uint8_t* head;
    const uint16_t* embedding;
    const float *dense, *final_norm, *cos, *sin;
};

// How rows enter a drafter's block, and what its scores belong to.
struct EntmtpFront {
    const uint8_t* join;          // [hidden][2 * hidden]; null: rows enter as they are
    int32_t hidden_first;
    const float* output_bias;     // or null
    entmtp::Vocabulary vocabulary;
};

struct EntmtpMatrix { const uint8_t* packed; const float* bias; int32_t channels, k; };

// A head by the indices of its matrices; `first` is -1 where there is none.
struct EntmtpHead {
    int32_t first, output, num_blocks;
    const int32_t* blocks;
};

struct EntmtpHeads {
    int32_t hidden, num_matrices, num_heads;
    const EntmtpMatrix* matrices;
    const EntmtpHead* heads;
    entmtp::Vocabulary vocabulary;
};

// What fills a depth of a tree: rows are the nodes above that have children.
struct EntmtpLevel {
    int32_t rows, children, width;    // width: candidates that a row must yield
    const int32_t* paths;             // [rows][depth + 1] nodes from the root to the row's own
    const int32_t *nodes, *parents, *ranks; // [children], `parents` as rows
    const int32_t* above;             // [rows] row of the depth before, below the root
    const uint8_t* mask;              // [rows][rows of depths before but the root + rows]
};

// A tree to be filled with the best children; `tokens` holds the root everywhere.
struct EntmtpTree {
    int32_t num_nodes, num_levels;
    const EntmtpLevel* levels;
    int32_t* tokens;                  // [num_nodes]
    const float* const* noise;        // [num_levels], see Ranking; or null
    float scale;
};

// A tree that is grown inside an envelope, whose levels hold neither `above` nor `mask`.
struct EntmtpGrowth {
    int32_t num_nodes, num_levels;    // nodes of the envelope with its root; depths that are allowed
    const EntmtpLevel* levels;
    const float* table;               // [num_nodes - 1][kCodes]: probability of a node given its parent
    const double* rows_ms;            // [num_nodes + num_copied], by drafted nodes
    const double *draft_ms, *draft_row_ms, *gains; // [num_levels]
    double rate;                      // tokens a millisecond is worth
    int32_t* tokens;                  // [num_nodes], the root everywhere
    const float* const* noise;        // as in EntmtpTree
    float scale;
    int32_t num_copied;               // tokens of a copy, which are nodes num_nodes + m where no other stands for them
    const int32_t* copied;            // [num_copied]
    const double *hits, *mixes;       // [num_copied]
    uint8_t* codes;                   // [num_nodes], 255 everywhere; of the nodes that are scored
    int32_t* kept;                    // [num_nodes + num_copied]: nodes worth checking, best first
    int32_t num_kept, attach;         // attach: what the copy's own nodes hang on
};

// Rows of a sequence that a block reads first; the last one is that of the root.
struct EntmtpText {
    entmtp::Cache* cache;
    int32_t num_rows;
    const float* inputs;              // [num_rows][hidden]
    const int32_t* tokens;            // [num_rows]
};

int entmtp_cache_commit(const entmtp::Engine* e, entmtp::Cache* cache, const int32_t* rows, int count);
int entmtp_forward(entmtp::Engine* e, const entmtp::Job* job);
int entmtp_heads_run(entmtp::Engine* e, const entmtp::HeadJob* job);

} // extern "C"
