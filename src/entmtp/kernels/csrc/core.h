// Plain data of the int8 decode core. No inline functions here: this header is compiled once for
// every instruction set, and the linker would keep one copy of them, perhaps the wrong one.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace entmtp {

// A panel is 32 output channels: two vectors of 16, so that the rotary pairs (i, i + dim/2) and
// the gate and up channels that belong together lie in one panel.
constexpr int kPanel = 32;
constexpr int kBlockRows = 128;   // rows that go through the layers together
constexpr int kKeyBlock = 64;     // tokens in a transposed block of keys: [dim][64]
constexpr int kSpan = 128;        // positions whose attention is summed on its own
constexpr int kVocabChunk = 1024; // channels in a partial log-sum-exp
constexpr int kMaxThreads = 64;
constexpr int kMaxPending = 1024; // rows of one sequence behind its committed ones
constexpr int kMaxBest = 64;      // columns that are ranked for a row

struct Config {
    int32_t layers, hidden, heads, kv_heads, head_dim, inter, vocab, max_positions;
    int32_t qkv_bias, o_bias, mlp_bias, qk_norm;
    int32_t mix;                  // vectors of 16 that a Hadamard transform mixes before `down`
    int32_t odd;                  // size of the dense factor of the residual rotation
    float eps;
};

using half_t = uint16_t;          // IEEE binary16

// Where the panels of one matrix lie in the packed file, and how many.
struct Matrix { const uint8_t* panels; int32_t num_panels, k; };

struct Layer {
    Matrix qkv, o, gate_up, down;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias, *q_norm, *k_norm; // or null
};

struct Weights {
    Layer* layers;
    Matrix head;
    const half_t* embedding;      // [vocab][hidden], rotated
    const float* dense;           // [odd][odd] factor of the rotation
    const float* final_norm;      // [hidden], for the hidden states that leave the core
    const float *cos, *sin;       // [max_positions][head_dim / 2]
};

// What a drafter reads of its target, and what it scores.
struct Vocabulary {
    const float* embedding;       // [tokens][hidden], the target's own; null where none is read
    float embed_scale;
    int32_t tokens;
    int32_t columns;              // tokens that are scored
    const int32_t* hot_ids;       // [columns]
};

// A matrix of a drafter with its bias, or null.
struct Biased { Matrix matrix; const float* bias; };

// What makes the first rows of a drafter's block of the rows given: a product with
// [norm(E(token)), norm(row)], or a rotation of the row where there is no matrix.
struct Front { Matrix join; int32_t hidden_first; };

// A head: x = R u + SiLU(W u) on u = [row, E(token), ...], where there is such a matrix (16 channels
// of R, then 16 of W, and so on); x += SiLU(W x) for each block; scores.
struct Head {
    Biased first;
    const Biased* blocks;
    int32_t num_blocks;
    Biased output;
};

// Keys and values of one sequence in half precision. keys: [layer][kv][block][dim][64];
// values: [layer][kv][slot][dim]. Slots below `length` are committed: slot = position.
struct Cache { int32_t capacity, length; half_t *keys, *values; };

// The rows of one sequence in a forward. Under a mask they may follow rows of earlier forwards that
// were held and not committed: slots behind `length`.
struct Segment {
    Cache* cache;
    int32_t first_row, num_rows;
    const uint8_t* mask;          // [num_rows][held + num_rows]; null is causal
    const int32_t* held_positions; // [held]
    int32_t held;
};

// Statistics of one row of logits.
struct RowStats { int32_t argmax; float p_max, log_sum_exp, entropy; };

struct Partial { float max, sum, weighted; int32_t argmax; };

// What a drafter is asked for: all scores of some rows, or their best columns. A column is ranked by
// its score, or, under noise, by noise + score * scale; ties go to the lower column.
struct Ranking {
    float* scores;                // [rows][columns] or null
    int32_t count;                // columns wanted of each row, best first; 0 beside all scores
    int32_t* best;                // [rows][count]
    float* values;                // [rows][count], what they are ranked by; beside log_sums, their scores
    const float* const* noise;    // [rows], each [columns] or null; or null
    const float* scale;           // [rows] or null
    float* log_sums;              // [rows] log of the sum of exp(score) over all columns, or null
};

struct Job {
    const int32_t *tokens, *positions;
    const Segment* segments;
    int32_t num_segments, num_rows;
    float* hidden;                // [num_rows][hidden] or null
    const int32_t* logit_rows;    // rows that the output head is asked for
    int32_t num_logit_rows;
    float* logits;                // [num_logit_rows][vocab] or null
    RowStats* stats;              // [num_logit_rows] or null
    const float* inputs;          // of a drafter's block: rows [num_rows][hidden]
    Ranking ranking;              // of a drafter's block, instead of logits
};

// Rows of one depth of draft trees that a head scores.
struct HeadJob {
    int32_t head, num_rows, num_base;
    const float* base;            // [num_base][hidden]
    const int32_t* base_of;       // [num_rows]: index of the row of `base` that a row begins with
    const int32_t* tokens;        // [num_rows][head + 1]; null where a head reads none
    Ranking ranking;
};

// A single product: rows [num_rows][k] to [num_rows][channels].
struct Product {
    Matrix matrix;
    const float *bias, *rows;     // bias or null
    float* out;
    int32_t num_rows, channels;
};

// Quantised rows: `bytes` a row, then one scale a row.
struct Rows { uint8_t* data; float* scale; };

struct Scratch {                  // of one thread
    Rows rows;
    float *row, *scores, *logits;
};

// Items of a phase of a forward that are done, by all threads.
struct Phase { std::atomic<int32_t> done; };

struct Model {
    Config c;
    Weights w;
    int32_t threads;
    Scratch scratch[kMaxThreads];
    Rows rows;
    float *x, *q, *h, *att;       // shared activations of a block of rows
    float* parts;                 // attention: [row][head][span][dim + 2]
    int32_t max_spans;
    Partial* vocab_parts;
    Phase* phases;
    std::atomic<int32_t>* claims;  // [thread][claim_stride]: items claimed of a thread's share of a phase
    int32_t num_phases, claim_stride;
    int32_t score_stride;         // floats of a query in Scratch::scores
    Job job;
    const Product* product;       // instead of a job, if not null
    const HeadJob* head_job;      // instead of a job, if not null
    int32_t block_first, block_rows;  // rows of the job in the present block
    // of drafters alone
    Vocabulary vocabulary;
    Front front;
    const Head* heads;
    const float* output_bias;     // [columns] or null
    float* ranked;                // scores of rows whose best columns alone are wanted
};

// A row of scores that a token is to be drawn from, and room for the ids that can be it.
struct Draw {
    uint64_t seed, position;
    const float* scores;     // [count]
    int32_t count;
    float temperature;       // above 0: raw logits x become scores (x - max) / temperature; 0: scores as they are
    const uint32_t* known;   // [count] words of the position, or null
    int32_t* ids;            // [count] out, rising
    uint32_t* words;         // [count] out, of these ids
    float* chosen;           // [count] out, their scores
};

// What an instruction set brings.
struct Isa {
    const char* name;
    int32_t act_bytes;            // of one quantised activation
    int32_t layout;               // of the bytes in a panel
    void (*run)(Model&, int thread);
    void (*pack)(const int8_t* rows, int32_t k, uint8_t* panel); // 32 rows of k weights
    // The innermost product, again and again on the same panel; returns its multiplications.
    int64_t (*dot)(const uint8_t* panel, const uint8_t* rows, int32_t k, int32_t repeats);
    void (*noise_words)(uint64_t seed, uint64_t position, int32_t count, uint32_t* words);
    int32_t (*noise_candidates)(const Draw& draw);
};

extern const Isa kPortable, kAvx2, kAvx512;

} // namespace entmtp
