// Random models for the programs that run under sanitizers.
#pragma once
#include "engine.h"
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

using namespace entmtp;

extern "C" {
struct Linear;
int entmtp_abi();
int entmtp_isa_supported(const char*);
int entmtp_isa_layout(const char*);
int entmtp_pack(const char*, const float*, int, int, uint8_t*);
size_t entmtp_packed_bytes(int, int);
Engine* entmtp_model_new(const Config*, const EntmtpWeights*, int, const char*);
void entmtp_model_free(Engine*);
int entmtp_model_threads(Engine*, int);
size_t entmtp_model_bytes(const Engine*);
Cache* entmtp_cache_new(const Engine*, int);
void entmtp_cache_free(Cache*);
int entmtp_cache_length(const Cache*);
int entmtp_cache_capacity(const Cache*);
Cache* entmtp_cache_grow(const Engine*, Cache*, int);
int entmtp_cache_truncate(Cache*, int);
Engine* entmtp_block_new(Engine*, const Config*, const EntmtpWeights*, const EntmtpFront*);
Engine* entmtp_heads_new(Engine*, const EntmtpHeads*);
int entmtp_heads_fill(Engine*, const float*, const EntmtpTree*, int);
int entmtp_block_fill(Engine*, const EntmtpText*, const EntmtpTree*, int);
int entmtp_heads_grow(Engine*, const float*, EntmtpGrowth*, int);
int entmtp_block_grow(Engine*, const EntmtpText*, EntmtpGrowth*, int);
Linear* entmtp_linear_new(const uint8_t*, const float*, int, int);
void entmtp_linear_free(Linear*);
int entmtp_linear_run(Engine*, Linear*, const float*, int, float*);
int entmtp_noise_words(const char*, uint64_t, uint64_t, int, uint32_t*);
int entmtp_noise_candidates(const char*, const Draw*);
}

namespace {

int num_compared = 0;

void check(bool is_true, const char* what, long detail = 0) {
    if (is_true) return;
    fprintf(stderr, "FAILED: %s (%ld)\n", what, detail);
    exit(1);
}

using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;

// Random weights of one model, packed; the core copies them.
struct Weighted {
    Config c;
    std::string isa;
    std::mt19937 rng{7};
    std::vector<std::vector<uint8_t>> packed;
    std::vector<Floats> floats;
    std::vector<uint16_t> embedding;
    std::vector<EntmtpLayer> layers;
    EntmtpWeights w{};

    float normal(float scale) { return scale * std::normal_distribution<float>()(rng); }
    const float* vector(size_t size, float mean, float scale) {
        Floats v(size);
        for (float& x : v) x = mean + normal(scale);
        floats.push_back(std::move(v));
        return floats.back().data();
    }
    const uint8_t* matrix(int channels, int k) {
        Floats rows(static_cast<size_t>(channels) * k);
        for (float& x : rows) x = normal(0.15f);
        std::vector<uint8_t> out(entmtp_packed_bytes(channels, k));
        check(entmtp_pack(isa.c_str(), rows.data(), channels, k, out.data()) == 0, "pack");
        packed.push_back(std::move(out));
        return packed.back().data();
    }
    Weighted(const Config& config, const char* name) : c(config), isa(name) {
        int width = c.heads * c.head_dim, qkv = (c.heads + 2 * c.kv_heads) * c.head_dim;
        for (int l = 0; l < c.layers; l++) {
            EntmtpLayer x{};
            x.qkv = matrix(qkv, c.hidden), x.o = matrix(c.hidden, width);
            x.gate_up = matrix(2 * c.inter, c.hidden), x.down = matrix(c.hidden, c.inter);
            if (c.qkv_bias) x.qkv_bias = vector(qkv, 0, 0.3f);
            if (c.o_bias) x.o_bias = vector(c.hidden, 0, 0.3f);
            if (c.mlp_bias) x.gate_up_bias = vector(2 * c.inter, 0, 0.3f), x.down_bias = vector(c.hidden, 0, 0.3f);
            if (c.qk_norm) x.q_norm = vector(c.head_dim, 1, 0.2f), x.k_norm = vector(c.head_dim, 1, 0.2f);
            layers.push_back(x);
        }
        w.layers = layers.data(), w.head = matrix(c.vocab, c.hidden);
        embedding.resize(static_cast<size_t>(c.vocab) * c.hidden);
        for (auto& h : embedding) h = static_cast<uint16_t>((rng() & 0x83FF) | (12 + rng() % 4) << 10);
        w.embedding = embedding.data();
        w.dense = vector(static_cast<size_t>(c.odd) * c.odd, 0, 0.6f), w.final_norm = vector(c.hidden, 1, 0.2f);
        Floats cosines, sines;
        for (int p = 0; p < c.max_positions; p++)
            for (int i = 0; i < c.head_dim / 2; i++) {
                double angle = p * pow(10000.0, -2.0 * i / c.head_dim);
                cosines.push_back(static_cast<float>(cos(angle))), sines.push_back(static_cast<float>(sin(angle)));
            }
        floats.push_back(std::move(cosines)), w.cos = floats.back().data();
        floats.push_back(std::move(sines)), w.sin = floats.back().data();
    }
};

} // namespace
