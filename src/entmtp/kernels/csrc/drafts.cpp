// The C interface of drafters: single matrices, and heads.
#include "engine.h"
#include <algorithm>

namespace entmtp {

bool take_vocabulary(Engine& e, const Vocabulary& v) {
    if (v.tokens < 0 || v.columns < 0 || (v.columns && !v.hot_ids)) return false;
    for (int i = 0; i < v.columns; i++) if (v.hot_ids[i] < 0 || v.hot_ids[i] >= v.tokens) return false;
    e.vocabulary = v;
    e.vocabulary.hot_ids = e.copy(v.hot_ids, v.columns);
    return true;
}

int check_ranking(const Engine& e, const Ranking& r) {
    bool is_ranked = r.count > 0;
    if (!e.vocabulary.columns || r.count < 0 || is_ranked == (r.scores != nullptr)) return 9;
    if (is_ranked && (r.count > kMaxBest || r.count > e.vocabulary.columns || !r.best || !r.values)) return 9;
    return (r.noise && (!is_ranked || !r.scale)) || (r.log_sums && !is_ranked) ? 9 : 0;
}

void make_ranked(Engine& e, const Ranking& r, int rows) {
    size_t size = size_t(std::min(rows, kBlockRows)) * e.vocabulary.columns * sizeof(float);
    if (r.noise && r.log_sums) size *= 2;  // scores as they are, and as they are ranked
    if (r.count && size > e.ranked_buffer.size()) e.ranked_buffer = Buffer(size);
    e.ranked = e.ranked_buffer.as<float>();
}

namespace {

struct Linear {
    Buffer packed;
    std::vector<float> bias;
    Product product{};
};

// Whether the matrices of a head are there and fit together.
bool is_sound(const EntmtpHeads& h, int head) {
    const EntmtpHead& x = h.heads[head];
    auto fits = [&](int index, int channels, int k, bool needs_bias) {
        if (index < 0 || index >= h.num_matrices) return false;
        const EntmtpMatrix& m = h.matrices[index];
        return m.packed && m.channels == channels && m.k == k && (m.bias || !needs_bias);
    };
    if (x.first >= 0 && (!h.vocabulary.embedding || !fits(x.first, 2 * h.hidden, (head + 2) * h.hidden, true))) return false;
    for (int i = 0; i < x.num_blocks; i++)
        if (!fits(x.blocks[i], h.hidden, h.hidden, true)) return false;
    return fits(x.output, h.vocabulary.columns, h.hidden, false);
}

int check_head_job(const Engine& e, const HeadJob& j) {
    if (j.head < 0 || j.head >= static_cast<int>(e.head_list.size())) return 1;
    if (j.num_rows < 1 || !j.base || !j.base_of) return 2;
    bool reads_tokens = e.head_list[j.head].first.matrix.panels;
    if (reads_tokens && !j.tokens) return 2;
    for (int r = 0; r < j.num_rows; r++) {
        if (j.base_of[r] < 0 || j.base_of[r] >= j.num_base) return 3;
        for (int t = 0; reads_tokens && t <= j.head; t++) {
            int32_t token = j.tokens[static_cast<size_t>(r) * (j.head + 1) + t];
            if (token < 0 || token >= e.vocabulary.tokens) return 7;
        }
    }
    return check_ranking(e, j.ranking);
}

} // namespace
} // namespace entmtp

using namespace entmtp;

extern "C" {

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
int entmtp_linear_run(Engine* e, Linear* linear, const float* rows, int n, float* out) try {
    Product& p = linear->product;
    if (n < 0) return 1;
    for (int first = 0; first < n; first += kBlockRows) {
        p.num_rows = std::min(n - first, kBlockRows);
        p.rows = rows + static_cast<size_t>(first) * p.matrix.k;
        p.out = out + static_cast<size_t>(first) * p.channels;
        make_rows(*e, p.matrix.k, e->threads);
        e->product = &p;
        run(*e);
        e->product = nullptr;
    }
    return 0;
} catch (const std::bad_alloc&) { return -1; }

// Heads over a vocabulary. They compute on the threads of their target, which must outlive them, as
// the embedding must; null where the matrices do not fit together.
Engine* entmtp_heads_new(Engine* target, const EntmtpHeads* h) try {
    if (h->hidden < 32 || h->hidden % 32 || h->num_heads < 1 || h->vocabulary.columns < 1) return nullptr;
    auto e = std::make_unique<Engine>();
    e->isa = target->isa, e->pool = target->pool, e->is_draft = true;
    e->c.hidden = h->hidden;
    if (!take_vocabulary(*e, h->vocabulary)) return nullptr;
    size_t room = 0;
    int num_blocks = 0;
    for (int i = 0; i < h->num_heads; i++) {
        if (!is_sound(*h, i)) return nullptr;
        num_blocks = std::max(num_blocks, h->heads[i].num_blocks);
        if (h->heads[i].first >= 0) e->longest = std::max(e->longest, (i + 2) * h->hidden);
    }
    for (int i = 0; i < h->num_matrices; i++) room += WeightStream::room(h->matrices[i].channels, h->matrices[i].k);
    WeightStream stream(*e, room);
    std::vector<Biased> matrices;
    for (int i = 0; i < h->num_matrices; i++) {
        const EntmtpMatrix& m = h->matrices[i];
        matrices.push_back({stream.add(m.packed, m.channels, m.k), e->copy(m.bias, m.channels)});
    }
    e->head_blocks.resize(h->num_heads);
    for (int i = 0; i < h->num_heads; i++) {
        const EntmtpHead& from = h->heads[i];
        for (int b = 0; b < from.num_blocks; b++) e->head_blocks[i].push_back(matrices[from.blocks[b]]);
        Biased first = from.first < 0 ? Biased{} : matrices[from.first];
        e->head_list.push_back({first, e->head_blocks[i].data(), from.num_blocks, matrices[from.output]});
    }
    e->heads = e->head_list.data();
    e->longest = std::max(e->longest, h->hidden);
    allocate(*e, 2 * num_blocks + 8);
    fit_threads(*e, target->pool->threads());
    return e.release();
} catch (const std::bad_alloc&) { return nullptr; }

// Scores rows of one depth.
int entmtp_heads_run(Engine* e, const HeadJob* job) try {
    if (int error = check_head_job(*e, *job)) return error;
    make_ranked(*e, job->ranking, job->num_rows);
    e->head_job = job;
    for (int first = 0; first < job->num_rows; first += kBlockRows) {
        e->block_first = first, e->block_rows = std::min(job->num_rows - first, kBlockRows);
        run(*e);
    }
    e->head_job = nullptr;
    return 0;
} catch (const std::bad_alloc&) { return -1; }

} // extern "C"
