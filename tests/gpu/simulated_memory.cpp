#include "gpu/simulated_memory.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace zero::test::simulated_gpu {
namespace {

constexpr std::size_t kPage = 4096, kDeviceBlock = 512;
constexpr std::size_t kFilled = std::size_t{1} << 20;  // bytes of a new block that are filled

std::size_t rounded(std::size_t bytes, std::size_t to) { return std::max<std::size_t>((bytes + to - 1) / to * to, to); }

struct sigaction previous;

// A thread that asks whether operations have ended, and frees their memory then.
bool is_watchdog() {
  thread_local const bool is = [] {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return std::string(name) == "zero-watchdog";
  }();
  return is;
}
thread_local HappensBefore::Clock seen_by_watchdog;

}  // namespace

Machine& Machine::get() {
  static pid_t owner = 0;
  static Machine* machine = nullptr;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (owner != getpid()) {
    owner = getpid();
    machine = new Machine;  // lives as long as the tensors of the process
  }
  return *machine;
}

Machine::Machine() {
  for (auto* region : {&device_, &pinned_}) {
    const int file = memfd_create("simulated_gpu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(kBytes)) != 0) throw std::runtime_error("no memory file");
    const auto map = [&](int protection) {
      void* const at = mmap(nullptr, kBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      if (at == MAP_FAILED) throw std::runtime_error("no address space for the simulated GPU");
      return static_cast<char*>(at);
    };
    region->seen = map(region == &device_ ? PROT_NONE : PROT_READ | PROT_WRITE);
    region->reached = map(PROT_READ | PROT_WRITE);
    close(file);
  }
  struct sigaction action {};
  action.sa_sigaction = &Machine::on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &previous);
}

void* Machine::cut(Region& region, std::size_t bytes) {
  if (region.used + bytes > kBytes) throw std::bad_alloc();
  void* const data = region.seen + region.used;
  region.used += bytes;
  return data;
}

void* Machine::allocate_device(std::size_t bytes, int stream) {
  const std::lock_guard lock(mutex_);
  const auto size = rounded(bytes, kDeviceBlock);
  const auto range = free_device_.equal_range({stream, size});
  void* data;
  if (range.first == range.second) {
    data = cut(device_, size);
    blocks_[data] = {size, stream, false};
  } else {
    const auto last = std::prev(range.second);  // the one that was freed last
    data = last->second;
    blocks_.at(data).live = true;
    free_device_.erase(last);
  }
  allocated_ += size;
  peak_ = std::max(peak_, allocated_);
  std::memset(device_.reached + (static_cast<char*>(data) - device_.seen), 0xff, std::min(size, kFilled));
  return data;
}

void Machine::free_device(void* data) {
  const std::lock_guard lock(mutex_);
  auto& block = blocks_.at(data);
  block.live = false;
  allocated_ -= block.bytes;
  if (is_watchdog()) order_.forget(reinterpret_cast<std::uintptr_t>(data), block.bytes, seen_by_watchdog);
  if (!block.kept) free_device_.emplace(std::pair{block.stream, block.bytes}, data);
}

void Machine::keep(void* data) {
  const std::lock_guard lock(mutex_);
  auto it = blocks_.upper_bound(data);
  if (it != blocks_.begin()) std::prev(it)->second.kept = true;
}

void* Machine::allocate_pinned(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto size = rounded(bytes, kPage);
  const auto range = free_pinned_.equal_range(size);
  for (auto it = range.first; it != range.second; ++it) {
    void* const data = it->second;
    if (order_.in_use(reinterpret_cast<std::uintptr_t>(data), size)) continue;
    free_pinned_.erase(it);
    return data;
  }
  void* const data = cut(pinned_, size);
  blocks_[data] = {size, 0, false};
  return data;
}

void Machine::free_pinned(void* data) {
  const std::lock_guard lock(mutex_);
  free_pinned_.emplace(blocks_.at(data).bytes, data);
}

void Machine::free_host(void* data) {
  {
    const std::lock_guard lock(mutex_);
    if (order_.in_use(reinterpret_cast<std::uintptr_t>(data), blocks_.at(data).bytes))
      faults_.push_back("the host frees pinned memory that an operation may still use");
  }
  free_pinned(data);
}

void* Machine::reach(const void* data) const {
  auto* const address = static_cast<char*>(const_cast<void*>(data));
  for (const auto* region : {&device_, &pinned_})
    if (region->holds(address)) return region->reached + (address - region->seen);
  return address;
}

void Machine::operation(int stream, const std::string& name, std::vector<HappensBefore::Access> accesses) {
  const std::lock_guard lock(mutex_);
  std::erase_if(accesses, [&](const HappensBefore::Access& each) {
    const auto* const data = reinterpret_cast<const void*>(each.begin);
    return each.bytes == 0 || (!is_device(data) && !is_pinned(data));
  });
  for (const auto& each : accesses) check_live(name, each);
  order_.operation(stream, name, accesses);
  operations_.push_back(std::to_string(stream) + " " + name);
  for (const auto& each : accesses)
    if (is_pinned(reinterpret_cast<const void*>(each.begin))) close_pages(each);
}

// Memory that was freed before an operation was enqueued may be anybody's when it runs.
void Machine::check_live(const std::string& name, const HappensBefore::Access& access) {
  auto it = blocks_.upper_bound(reinterpret_cast<void*>(access.begin));
  if (it == blocks_.begin()) return;
  --it;
  if (!is_device(it->first) || it->second.live) return;
  auto text = name + (access.write ? " writes" : " reads") + " memory that was freed before it was enqueued";
  if (std::find(faults_.begin(), faults_.end(), text) == faults_.end()) faults_.push_back(std::move(text));
}

// Nobody may touch what an operation writes, and nobody write what it reads. By pages: a fault looks at the byte.
void Machine::close_pages(const HappensBefore::Access& access) {
  auto* const first = pinned_.seen + (access.begin - reinterpret_cast<std::uintptr_t>(pinned_.seen)) / kPage * kPage;
  const auto bytes = rounded(access.begin + access.bytes - reinterpret_cast<std::uintptr_t>(first), kPage);
  for (auto* page = first; page < first + bytes; page += kPage) {
    auto [it, inserted] = pages_.try_emplace(page, access.write ? PROT_NONE : PROT_READ);
    if (access.write) it->second = PROT_NONE;
    mprotect(page, kPage, it->second);
  }
}

void Machine::open_pages() {
  std::erase_if(pages_, [&](const auto& each) {
    if (order_.in_use(reinterpret_cast<std::uintptr_t>(each.first), kPage)) return false;
    mprotect(each.first, kPage, PROT_READ | PROT_WRITE);
    return true;
  });
}

bool Machine::fault_at(char* address, bool write) {
  const std::lock_guard lock(mutex_);
  auto* const page = address - reinterpret_cast<std::uintptr_t>(address) % kPage;
  if (device_.holds(address)) {
    faults_.push_back(std::string("the host ") + (write ? "writes" : "reads") + " device memory");
  } else if (pinned_.holds(address)) {
    const auto byte = reinterpret_cast<std::uintptr_t>(address);
    if (order_.in_use(byte, write)) order_.host_access("pinned memory", {byte, 1, write});
    pages_.erase(page);
  } else {
    return false;
  }
  mprotect(page, kPage, PROT_READ | PROT_WRITE);
  return true;
}

void Machine::on_fault(int, siginfo_t* info, void* context) {
  constexpr long long kWrite = 2;  // of the page fault's error code
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
  const bool write = (registers.gregs[REG_ERR] & kWrite) != 0;
  if (get().fault_at(static_cast<char*>(info->si_addr), write)) return;
  sigaction(SIGSEGV, &previous, nullptr);  // the instruction faults again, as it would without this handler
}

HappensBefore::Clock Machine::recorded(int stream) {
  const std::lock_guard lock(mutex_);
  return order_.recorded(stream);
}

void Machine::stream_waits(int stream, const HappensBefore::Clock& clock) {
  const std::lock_guard lock(mutex_);
  order_.stream_waits(stream, clock);
}

void Machine::host_waits(const HappensBefore::Clock& clock) {
  std::unique_lock lock(mutex_);
  released_.wait(lock, [&] { return !hangs(clock); });
  if (order_.host_knows(clock)) return;
  operations_.push_back("host waits");
  order_.host_waits(clock);
  open_pages();
}

void Machine::host_waits_for_all() {
  std::unique_lock lock(mutex_);
  released_.wait(lock, [&] { return hanging_.empty(); });
  operations_.push_back("host waits");
  order_.host_waits_for_all();
  open_pages();
}

bool Machine::query(const HappensBefore::Clock& clock) {
  constexpr int kPatience = 20;
  thread_local HappensBefore::Clock asked;
  thread_local int times = 0;
  const std::lock_guard lock(mutex_);
  if (hangs(clock)) return false;
  if (order_.host_knows(clock)) return true;
  times = std::exchange(asked, clock) == clock ? times + 1 : 0;
  if (!queries_are_reached && times < kPatience) return false;
  if (is_watchdog()) {
    HappensBefore::join(seen_by_watchdog, clock);
    return true;
  }
  order_.host_waits(clock);
  open_pages();
  return true;
}

void Machine::hang(int stream) {
  const std::lock_guard lock(mutex_);
  const auto clock = order_.recorded(stream);
  hanging_.try_emplace(stream, clock[static_cast<std::size_t>(stream)]);
}

void Machine::release(int stream) {
  const std::lock_guard lock(mutex_);
  hanging_.erase(stream);
  released_.notify_all();
}

bool Machine::hangs(const HappensBefore::Clock& clock) const {
  return std::any_of(hanging_.begin(), hanging_.end(), [&](const auto& each) {
    const auto stream = static_cast<std::size_t>(each.first);
    return stream < clock.size() && clock[stream] >= each.second;
  });
}

void Machine::add_fault(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (std::find(faults_.begin(), faults_.end(), text) == faults_.end()) faults_.push_back(text);
}

std::vector<std::string> Machine::take_faults() {
  const std::lock_guard lock(mutex_);
  auto faults = order_.take_faults();
  faults.insert(faults.end(), faults_.begin(), faults_.end());
  faults_.clear();
  return faults;
}

std::vector<std::string> Machine::take_operations() {
  const std::lock_guard lock(mutex_);
  return std::exchange(operations_, {});
}

}  // namespace zero::test::simulated_gpu
