// What the innermost product reaches on this machine.
#include "engine.h"
#include <algorithm>
#include <chrono>
#include <system_error>

using namespace entmtp;

extern "C" {

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

} // extern "C"
