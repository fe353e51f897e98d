// A fake accelerator for Paddle's CustomDevice interface, which makes mistakes of host code visible.
//
// Memory: a device address is a page without any access right; its numbers live elsewhere (behind()). Whatever touches
// it but a copy of this file is a segmentation fault.
//
// There is a limit, beyond which no block is allocated, and a block that is given back is poisoned at once, also for
// work that has not begun.
//
// Time: work on a stream is as late as it may be. A stream's thread begins when something waits for it, by the stream,
// an event or the device; never before. So a host that reads a target too early finds the old numbers, and a host that
// reuses a source too early sends the new ones, every time. All host memory counts as page-locked: no asynchronous copy
// is staged or finished for a caller that does not wait. One wait cannot be missed: when an event of Paddle's is
// destroyed, Paddle waits for it (of a CustomDevice, not of CUDA).
//
// Counts: bytes copied each way, and those of them that were copied asynchronously; waits of the host for events.

#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "paddle/phi/backends/device_ext.h"

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMemory = size_t{8} << 30;
constexpr int kPoison = 0xA5;

enum Way { kToDevice, kToHost, kInside };
std::atomic<uint64_t> counts[6];  // bytes by way; then the asynchronous ones of them by way

void count(Way way, size_t bytes, bool asynchronous) {
  counts[way] += bytes;
  if (asynchronous) counts[3 + way] += bytes;
}

// ---- Memory

struct Block {
  size_t size;
  char* numbers;
};

std::mutex blocks_mutex;
std::map<uintptr_t, Block> blocks;  // by device address
size_t allocated = 0, limit = kMemory;  // bytes

// ---- Streams. Never deleted: events of a destroyed stream may still be asked.

class Stream {
 public:
  uint64_t submit(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {  // Not before: a thread would not survive a fork.
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    queue_.push_back(std::move(work));
    return ++submitted_;
  }

  uint64_t submitted() {
    std::lock_guard<std::mutex> lock(mutex_);
    return submitted_;
  }

  void wait(uint64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    want(ticket);
    changed_.wait(lock, [&] { return done_ >= ticket; });
  }

  // Whether it is done, without asking for it.
  bool has_done(uint64_t ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= ticket;
  }

  bool is_done(uint64_t ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    want(ticket);
    return done_ >= ticket;
  }

 private:
  void want(uint64_t ticket) {
    if (ticket > wanted_) wanted_ = ticket;
    changed_.notify_all();
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !queue_.empty() && done_ < wanted_; });
      auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t submitted_ = 0, done_ = 0, wanted_ = 0;
  bool started_ = false;
};

struct Event {
  Stream* stream = nullptr;
  uint64_t ticket = 0;
};

std::mutex streams_mutex;
std::vector<Stream*> streams;

Stream* of(C_Stream stream) { return reinterpret_cast<Stream*>(stream); }
Event* of(C_Event event) { return reinterpret_cast<Event*>(event); }

std::vector<Stream*> all_streams() {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return streams;
}

void wait_for_all() {
  for (auto* stream : all_streams()) stream->wait(stream->submitted());
}

// Blocks that were given back, each with the work that may still use it: to wait for that work here would hide a wait
// that is missing elsewhere.
struct Returned {
  Block block;
  std::vector<Event> until;
};

std::mutex returned_mutex;
std::list<Returned> returned;

void release(Block block) {
  Returned last{block, {}};
  for (auto* stream : all_streams()) last.until.push_back(Event{stream, stream->submitted()});
  std::lock_guard<std::mutex> lock(returned_mutex);
  returned.push_back(std::move(last));
  returned.remove_if([](const Returned& one) {
    for (const auto& event : one.until)
      if (!event.stream->has_done(event.ticket)) return false;
    munmap(one.block.numbers, one.block.size);
    return true;
  });
}

// ---- The interface, in its order

C_Status done() { return C_SUCCESS; }
C_Status any_device(const C_Device) { return C_SUCCESS; }

C_Status get_device(const C_Device device) {
  device->id = 0;
  return C_SUCCESS;
}

C_Status create_stream(const C_Device, C_Stream* stream) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams.push_back(new Stream);
  *stream = reinterpret_cast<C_Stream>(streams.back());
  return C_SUCCESS;
}

std::atomic<uint64_t> synchronisations{0};

C_Status synchronize_stream(const C_Device, C_Stream stream) {
  ++synchronisations;
  of(stream)->wait(of(stream)->submitted());
  return C_SUCCESS;
}

C_Status query_stream(const C_Device, C_Stream stream) {
  return of(stream)->is_done(of(stream)->submitted()) ? C_SUCCESS : C_FAILED;
}

C_Status stream_add_callback(const C_Device device, C_Stream stream, C_Callback callback, void* data) {
  C_Device_st copy = *device;
  of(stream)->submit([copy, stream, callback, data]() mutable {
    C_Status status = C_SUCCESS;
    callback(&copy, stream, data, &status);
  });
  return C_SUCCESS;
}

C_Status create_event(const C_Device, C_Event* event) {
  *event = reinterpret_cast<C_Event>(new Event);
  return C_SUCCESS;
}

C_Status record_event(const C_Device, C_Stream stream, C_Event event) {
  *of(event) = Event{of(stream), of(stream)->submitted()};
  return C_SUCCESS;
}

C_Status destroy_event(const C_Device, C_Event event) {
  delete of(event);
  return C_SUCCESS;
}

std::atomic<bool> is_broken{false};

C_Status query_event(const C_Device, C_Event event) {
  if (is_broken) return C_FAILED;
  auto [stream, ticket] = *of(event);
  return stream == nullptr || stream->is_done(ticket) ? C_SUCCESS : C_FAILED;
}

C_Status synchronize_device(const C_Device) {
  ++synchronisations;
  wait_for_all();
  return C_SUCCESS;
}

std::atomic<uint64_t> event_waits{0};

C_Status synchronize_event(const C_Device, C_Event event) {
  ++synchronisations;
  auto [stream, ticket] = *of(event);
  if (stream == nullptr || stream->has_done(ticket)) return C_SUCCESS;
  ++event_waits;
  if (is_broken) return C_FAILED;
  stream->wait(ticket);
  return C_SUCCESS;
}

C_Status stream_wait_event(const C_Device, C_Stream stream, C_Event event) {
  auto recorded = *of(event);
  if (recorded.stream != nullptr && recorded.stream != of(stream))
    of(stream)->submit([recorded] { recorded.stream->wait(recorded.ticket); });
  return C_SUCCESS;
}

C_Status allocate(const C_Device, void** address, size_t size) {
  size_t rounded = size == 0 ? kPage : (size + kPage - 1) / kPage * kPage;
  std::lock_guard<std::mutex> lock(blocks_mutex);
  if (allocated + rounded > limit) return C_FAILED;
  void* guarded = mmap(nullptr, rounded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* numbers = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (guarded == MAP_FAILED || numbers == MAP_FAILED) return C_FAILED;
  allocated += rounded;
  blocks[reinterpret_cast<uintptr_t>(guarded)] = Block{rounded, static_cast<char*>(numbers)};
  *address = guarded;
  return C_SUCCESS;
}

C_Status deallocate(const C_Device, void* address, size_t) {
  Block block;
  {
    std::lock_guard<std::mutex> lock(blocks_mutex);
    auto found = blocks.find(reinterpret_cast<uintptr_t>(address));
    if (found == blocks.end()) return C_ERROR;
    block = found->second;
    blocks.erase(found);
    allocated -= block.size;
    munmap(address, block.size);
    memset(block.numbers, kPoison, block.size);
  }
  release(block);
  return C_SUCCESS;
}

C_Status set(const C_Device, void* address, unsigned char value, size_t size) {
  wait_for_all();
  memset(behind(address), value, size);
  return C_SUCCESS;
}

C_Status host_allocate(const C_Device, void** address, size_t size) {
  *address = malloc(size);
  return *address == nullptr ? C_FAILED : C_SUCCESS;
}

C_Status host_deallocate(const C_Device, void* address, size_t) {
  free(address);
  return C_SUCCESS;
}

template <Way way>
C_Status copy(const C_Device, void* target, const void* source, size_t size) {
  count(way, size, false);
  memcpy(behind(target), behind(source), size);
  return C_SUCCESS;
}

template <Way way>
C_Status copy_later(const C_Device, C_Stream stream, void* target, const void* source, size_t size) {
  count(way, size, true);
  void *to = behind(target), *from = behind(source);
  of(stream)->submit([to, from, size] { memcpy(to, from, size); });
  return C_SUCCESS;
}

C_Status device_count(size_t* number) {
  *number = 1;
  return C_SUCCESS;
}

C_Status device_list(size_t* devices) {
  devices[0] = 0;
  return C_SUCCESS;
}

C_Status memory_stats(const C_Device, size_t* total, size_t* available) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  *total = limit;
  *available = limit - std::min(limit, allocated);
  return C_SUCCESS;
}

template <size_t value>
C_Status size_of(const C_Device, size_t* size) {
  *size = value;
  return C_SUCCESS;
}

C_Status yes(const C_Device, bool* supported) {
  *supported = true;
  return C_SUCCESS;
}

template <typename T>
void add_scaled_numbers(C_Stream stream, size_t count, float alpha, void* x, float beta, void* y) {
  auto* from = static_cast<T*>(behind(x));
  auto* to = static_cast<T*>(behind(y));
  of(stream)->submit([=] {
    for (size_t k = 0; k < count; ++k) to[k] = static_cast<T>(alpha * from[k] + beta * to[k]);
  });
}

// Gradients are accumulated in place by it.
C_Status add_scaled(const C_Device, C_Stream stream, C_DataType type, size_t count, float alpha, void* x, float beta,
                    void* y) {
  if (type == C_DataType::FLOAT32) add_scaled_numbers<float>(stream, count, alpha, x, beta, y);
  else if (type == C_DataType::FLOAT64) add_scaled_numbers<double>(stream, count, alpha, x, beta, y);
  else return C_FAILED;
  return C_SUCCESS;
}

}  // namespace

void* behind(const void* address) {
  auto number = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(blocks_mutex);
  auto next = blocks.upper_bound(number);
  if (next != blocks.begin()) {
    const auto& [begin, block] = *std::prev(next);
    if (number - begin < block.size) return block.numbers + (number - begin);
  }
  return const_cast<void*>(address);
}

void submit(void* stream, std::function<void()> work) { static_cast<Stream*>(stream)->submit(std::move(work)); }

// Bytes to the device, to the host and inside the device; then the asynchronous ones of each.
extern "C" void fake_device_counts(uint64_t* out) {
  for (int i = 0; i < 6; ++i) out[i] = counts[i];
}

// How often the host has waited for an event that was not there yet, which holds the lock of Python's interpreter.
extern "C" uint64_t fake_device_event_waits() { return event_waits; }

// Calls that wait for the device, for a stream or for an event, whether there is something to wait for or not.
extern "C" uint64_t fake_device_synchronisations() { return synchronisations; }

// Bytes of all blocks.
extern "C" uint64_t fake_device_allocated() {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  return allocated;
}

// From now on no block is allocated beyond as many bytes of all blocks.
extern "C" void fake_device_limit(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  limit = bytes;
}

// From now on every query and wait of an event that was not there yet fails, as after an error of a device.
extern "C" void fake_device_break(bool broken) { is_broken = broken; }

void InitPlugin(CustomRuntimeParams* params) {
  auto* api = params->interface;
  if (params->size != sizeof(CustomRuntimeParams) || api->size != sizeof(C_DeviceInterface)) {
    fprintf(stderr, "The fake accelerator was built for another version of Paddle.\n");
    return;
  }
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>("fake_device");
  params->sub_device_type = const_cast<char*>("v0");
  memset(static_cast<void*>(api), 0, sizeof(C_DeviceInterface));
  api->size = sizeof(C_DeviceInterface);

  api->initialize = done;
  api->finalize = done;
  api->init_device = any_device;
  api->set_device = any_device;
  api->get_device = get_device;
  api->deinit_device = any_device;

  api->create_stream = create_stream;
  api->destroy_stream = synchronize_stream;
  api->query_stream = query_stream;
  api->stream_add_callback = stream_add_callback;
  api->create_event = create_event;
  api->record_event = record_event;
  api->destroy_event = destroy_event;
  api->query_event = query_event;
  api->synchronize_device = synchronize_device;
  api->synchronize_stream = synchronize_stream;
  api->synchronize_event = synchronize_event;
  api->stream_wait_event = stream_wait_event;

  api->device_memory_allocate = allocate;
  api->device_memory_deallocate = deallocate;
  api->device_memory_set = set;
  api->host_memory_allocate = host_allocate;
  api->host_memory_deallocate = host_deallocate;
  api->memory_copy_h2d = copy<kToDevice>;
  api->memory_copy_d2h = copy<kToHost>;
  api->memory_copy_d2d = copy<kInside>;
  api->async_memory_copy_h2d = copy_later<kToDevice>;
  api->async_memory_copy_d2h = copy_later<kToHost>;
  api->async_memory_copy_d2d = copy_later<kInside>;

  api->get_device_count = device_count;
  api->get_device_list = device_list;
  api->device_memory_stats = memory_stats;
  api->device_min_chunk_size = size_of<512>;
  api->device_max_chunk_size = size_of<size_t{1} << 30>;
  api->device_max_alloc_size = size_of<size_t{1} << 30>;
  api->device_extra_padding_size = size_of<0>;
  api->device_init_alloc_size = size_of<0>;
  api->device_realloc_size = size_of<0>;
  api->is_float16_supported = yes;
  api->is_bfloat16_supported = yes;
  api->blas_axpby = add_scaled;
}
