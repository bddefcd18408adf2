// An allocator in front of torch's CPU allocator that counts every byte asked of it: tensors, the scratch of kernels,
// gloo's work buffers, from all threads. Memory that C++ code takes with malloc or new by itself does not pass here.
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

constexpr size_t kHeaderBytes = 64;  // holds the counted size; keeps c10's alignment of 64 bytes
constexpr uint8_t kPriority = 200;   // above every allocator of torch's own

std::atomic<int64_t> live_bytes{0}, peak_bytes{0}, rounding_bytes{1};

void release(void* data) {
  if (data == nullptr) return;
  char* block = static_cast<char*>(data) - kHeaderBytes;
  int64_t counted = 0;
  std::memcpy(&counted, block, sizeof counted);
  live_bytes.fetch_sub(counted);
  std::free(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    void* block = nullptr;
    if (posix_memalign(&block, kHeaderBytes, bytes + kHeaderBytes) != 0) throw std::bad_alloc();
    const int64_t unit = rounding_bytes.load(std::memory_order_relaxed);
    const int64_t counted = (static_cast<int64_t>(bytes) + unit - 1) / unit * unit;
    std::memcpy(block, &counted, sizeof counted);
    const int64_t now = live_bytes.fetch_add(counted) + counted;
    int64_t highest = peak_bytes.load();
    while (now > highest && !peak_bytes.compare_exchange_weak(highest, now)) {
    }
    void* data = static_cast<char*>(block) + kHeaderBytes;
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

CountingAllocator allocator;

}  // namespace

extern "C" {
void meter_install(int64_t unit) {
  rounding_bytes.store(unit);
  c10::SetCPUAllocator(&allocator, kPriority);
}
int64_t meter_live_bytes() { return live_bytes.load(); }
int64_t meter_peak_bytes() { return peak_bytes.load(); }
void meter_reset_peak() { peak_bytes.store(live_bytes.load()); }
}
