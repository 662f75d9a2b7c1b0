// `zero doctor`: what this machine provides, how that affects libzero, and how to install what is missing. The probes
// are in tools/launch/machine/machine.h; this file has the verdicts, the table and the JSON document.
#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <zero/version.h>

#include "base/json_write.h"
#include "base/system.h"
#include "storage/leftovers.h"
#include "storage/storage_file.h"
#include "storage/swap_file.h"
#include "tools/commands.h"
#include "tools/launch/machine/host.h"
#include "tools/launch/machine/machine.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/options.h"

namespace {

using namespace zero;
namespace fs = std::filesystem;
using base::json_quote;
using report::human_bytes;

constexpr std::size_t kDirectBytes = 32 << 20;
constexpr std::uint64_t kMiB = 1 << 20, kGiB = 1 << 30;
constexpr const char* kTorchVersion = ZERO_TORCH_MINOR;  // that libzero was built with

// "missing": required by libzero. "note": costs speed, space or a feature.
enum class Verdict { Ok, Note, Missing };
const char* word(Verdict v) { return v == Verdict::Ok ? "ok" : v == Verdict::Note ? "note" : "missing"; }

struct Item {
  std::string name, found, hint;
  Verdict verdict = Verdict::Ok;
  std::vector<std::pair<std::string, std::string>> values;  // name, JSON
};

std::string number(std::uint64_t n) { return std::to_string(n); }
std::string boolean(bool b) { return b ? "true" : "false"; }
std::string list_of(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& w : words) text += (text.empty() ? "" : " ") + w;
  return text;
}
std::string json_list(const std::vector<std::string>& words) {
  std::string text = "[";
  for (const std::string& w : words) text += (text.size() > 1 ? ", " : "") + json_quote(w);
  return text + "]";
}

// "2.11.0+cu130", from version.py of a wheel or build-version of a C++ archive.
std::string torch_version(const fs::path& torch_folder) {
  std::ifstream wheel(torch_folder / "version.py");
  for (std::string line; std::getline(wheel, line);) {
    const std::size_t open = line.find('\'');
    if (line.rfind("__version__", 0) == 0 && open != std::string::npos)
      return line.substr(open + 1, line.find('\'', open + 1) - open - 1);
  }
  std::ifstream archive(torch_folder / "build-version");
  std::string version;
  std::getline(archive, version);
  return version;
}

// What `zero-torch torch-check` prints; empty if it does not run.
std::string printed_by(const fs::path& torch_part) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return {};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  std::string program = torch_part.string(), word = "torch-check", text;
  char* words[] = {program.data(), word.data(), nullptr};
  pid_t child = 0;
  const bool started = posix_spawn(&child, words[0], &actions, nullptr, words, environ) == 0;
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  char part[512];
  for (ssize_t n = 0; started && ((n = read(ends[0], part, sizeof part)) > 0 || (n < 0 && errno == EINTR));)
    if (n > 0) text.append(part, static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 0;
  while (started && waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return started && WIFEXITED(status) && WEXITSTATUS(status) == 0 ? text : std::string();
}

// Whether libtorch behaves as libzero relies on (include/zero/torch_check.h).
Item torch_mechanisms(const fs::path& torch_part) {
  Item item{"libtorch's mechanisms", "", "", Verdict::Ok, {}};
  std::istringstream lines(printed_by(torch_part));
  std::vector<std::string> works;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t tab = line.find('\t');
    const std::string name = line.substr(0, tab), fault = line.substr(std::min(line.size(), tab + 1));
    item.values.emplace_back(name, fault.empty() ? "null" : json_quote(fault));
    if (fault.empty())
      works.push_back(name);
    else
      item.found += (item.found.empty() ? "" : "; ") + name + ": " + fault;
  }
  if (item.found.empty() && !works.empty()) {
    item.found = number(works.size()) + " work";
    return item;
  }
  if (works.empty() && item.found.empty()) item.found = torch_part.string() + " does not start";
  item.verdict = Verdict::Missing;
  item.hint = "results may be wrong with this libtorch: use one that libzero was tested with (docs/dependencies.md)";
  return item;
}

void libraries(std::vector<Item>& items) {
  Item program{"zero", ZERO_VERSION, "", Verdict::Ok, {{"version", json_quote(ZERO_VERSION)}}};
#if defined(__clang__)
  const std::string compiler = std::string("clang ") + __clang_version__;
#else
  const std::string compiler = std::string("g++ ") + __VERSION__;
#endif
  program.found += ", built by " + compiler;
  program.values.emplace_back("compiler", json_quote(compiler));
  items.push_back(std::move(program));

  const fs::path self = launch::own_path(), torch_part = self.parent_path() / "zero-torch";
  fs::path library = launch::find_library(torch_part, "libzero.so.0");
  std::error_code error;
  if (library.empty()) library = (self.parent_path() / ".." / "lib" / "libzero.so.0").lexically_normal();
  const bool have_library = fs::is_regular_file(library, error), have_part = access(torch_part.c_str(), X_OK) == 0;
  Item own{"libzero", have_library ? library.string() : "not found", "", Verdict::Ok, {}};
  own.values = {{"path", have_library ? json_quote(library.string()) : "null"}, {"zero_torch", boolean(have_part)}};
  if (!have_library || !have_part) {
    own.verdict = Verdict::Missing;
    if (have_library) own.found += ", without " + torch_part.string();
    own.hint = "build or install the whole project: cmake --build BUILD; cmake --install BUILD";
  }
  items.push_back(std::move(own));

  const fs::path cpu = launch::find_library(have_library ? library : torch_part, "libtorch_cpu.so");
  const fs::path folder = cpu.empty() ? fs::path() : cpu.parent_path().parent_path();
  const std::string version = cpu.empty() ? "" : torch_version(folder);
  const bool cuda = !cpu.empty() && fs::is_regular_file(cpu.parent_path() / "libtorch_cuda.so", error);
  Item torch{"libtorch", "not found", "", Verdict::Ok, {}};
  torch.values = {{"version", version.empty() ? "null" : json_quote(version)},
                  {"path", folder.empty() ? "null" : json_quote(folder.string())},
                  {"cuda", boolean(cuda)}};
  if (!cpu.empty())
    torch.found =
        (version.empty() ? "unknown version" : version) + (cuda ? " with CUDA, " : " for CPUs, ") + folder.string();
  if (cpu.empty() || (!version.empty() && version.rfind(std::string(kTorchVersion) + ".", 0) != 0)) {
    torch.verdict = Verdict::Missing;
    torch.hint = std::string("libzero needs libtorch ") + kTorchVersion +
                 ": run script/setup, or put the folder of libtorch_cpu.so into LD_LIBRARY_PATH";
  }
  const bool usable = torch.verdict == Verdict::Ok;
  items.push_back(std::move(torch));
  if (usable && have_library && have_part) items.push_back(torch_mechanisms(torch_part));

  fs::path plug_in = have_library ? library.parent_path() / "libzero_nccl.so" : fs::path();
  if (!fs::is_regular_file(plug_in, error)) plug_in.clear();
  Item nccl{"NCCL plug-in", plug_in.empty() ? "not found" : plug_in.string(), "", Verdict::Ok, {}};
  nccl.values = {{"path", plug_in.empty() ? "null" : json_quote(plug_in.string())}};
  if (plug_in.empty()) {
    nccl.verdict = Verdict::Note;
    nccl.hint = "only GPUs need it: build where the CUDA headers and an NCCL library are found";
  }
  items.push_back(std::move(nccl));
}

void processors(std::vector<Item>& items) {
  const launch::CpuFacts cpu = launch::cpu_facts();
  const auto has = [&](const char* f) {
    return std::find(cpu.features.begin(), cpu.features.end(), f) != cpu.features.end();
  };
  Item model{"CPU", cpu.model.empty() ? "unknown model" : cpu.model, "", Verdict::Ok, {}};
  model.values = {{"model", json_quote(cpu.model)}, {"features", json_list(cpu.features)}};
  items.push_back(std::move(model));
  Item features{
      "CPU features", cpu.features.empty() ? "none of those asked for" : list_of(cpu.features), "", Verdict::Ok, {}};
  features.values = {{"avx2", boolean(has("avx2"))},
                     {"avx512", boolean(has("avx512f"))},
                     {"bf16", boolean(has("avx512_bf16") || has("amx_bf16") || has("bf16"))},
                     {"amx", boolean(has("amx_tile"))}};
  if (!has("avx2") && !has("asimd")) {
    features.verdict = Verdict::Note;
    features.hint = "without AVX2 optimizer steps and casts are several times slower";
  }
  items.push_back(std::move(features));

  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  const auto allowed = launch::allowed_cores().size();
  const int usable = launch::usable_cores();
  Item cores{"cores", std::to_string(usable) + " usable", "", Verdict::Ok, {}};
  if (static_cast<long>(allowed) < online)
    cores.found += ", affinity allows " + number(allowed) + " of " + std::to_string(online);
  if (usable < static_cast<int>(allowed)) cores.found += ", a cgroup quota allows no more of " + number(allowed);
  cores.values = {{"usable", std::to_string(usable)}, {"allowed", number(allowed)}, {"online", std::to_string(online)}};
  items.push_back(std::move(cores));
  const char* omp = std::getenv("OMP_NUM_THREADS");
  const bool given = omp && *omp;
  Item threads{"OMP threads",
               given ? std::string(omp) + " from OMP_NUM_THREADS" : "not set; zero run gives cores / ranks",
               "",
               Verdict::Ok,
               {}};
  threads.values = {{"omp_num_threads", given ? json_quote(omp) : "null"}};
  items.push_back(std::move(threads));
  const int nodes = launch::numa_nodes();
  Item numa{"NUMA nodes", std::to_string(nodes), "", Verdict::Ok, {{"nodes", std::to_string(nodes)}}};
  if (nodes > 1) {
    numa.verdict = Verdict::Note;
    numa.hint = "zero run --bind-cores-to-rank keeps each rank on one node";
  }
  items.push_back(std::move(numa));
}

void memory(std::vector<Item>& items) {
  const launch::MemoryFacts m = launch::memory_facts();
  Item ram{
      "memory", human_bytes(m.total_bytes) + ", " + human_bytes(m.available_bytes) + " available", "", Verdict::Ok, {}};
  if (m.cgroup_limit_bytes > 0) ram.found += ", cgroup limit " + human_bytes(m.cgroup_limit_bytes);
  if (m.swap_bytes > 0) ram.found += ", swap " + human_bytes(m.swap_bytes);
  ram.values = {{"total_bytes", number(m.total_bytes)},
                {"available_bytes", number(m.available_bytes)},
                {"cgroup_limit_bytes", m.cgroup_limit_bytes ? number(m.cgroup_limit_bytes) : "null"},
                {"swap_bytes", number(m.swap_bytes)}};
  if (m.available_bytes < kGiB) {
    ram.verdict = Verdict::Note;
    ram.hint = "less than 1GiB is available: see `zero plan`, or end other programs";
  }
  items.push_back(std::move(ram));

  const launch::SpaceFacts shm = launch::space_of("/dev/shm");
  Item shared{"/dev/shm",
              shm.error ? std::strerror(shm.error)
                        : human_bytes(shm.total_bytes) + ", " + human_bytes(shm.free_bytes) + " free",
              "",
              Verdict::Ok,
              {}};
  shared.values = {{"total_bytes", number(shm.total_bytes)}, {"free_bytes", number(shm.free_bytes)}};
  if (shm.error || shm.free_bytes < 64 * kMiB) {
    shared.verdict = Verdict::Note;
    shared.hint =
        "ranks of one host share memory through memfd and do not need it; other programs may: docker run --shm-size=1g";
  }
  items.push_back(std::move(shared));

  const int memfd = launch::try_memfd();
  Item anonymous{"memfd", memfd ? std::strerror(memfd) : "works", "", Verdict::Ok, {{"works", boolean(!memfd)}}};
  if (memfd) {
    anonymous.verdict = Verdict::Missing;
    anonymous.hint =
        "ranks of one host need memfd_create with seals: Linux 3.17 or later, and a sandbox that allows it";
  }
  items.push_back(std::move(anonymous));
}

void limit(std::vector<Item>& items, const char* name, int resource, bool bytes, rlim_t enough,
           const std::string& hint) {
  rlimit l{};
  getrlimit(resource, &l);
  const auto show = [&](rlim_t v) {
    return v == RLIM_INFINITY ? std::string("unlimited") : bytes ? human_bytes(v) : number(v);
  };
  const auto json = [](rlim_t v) { return v == RLIM_INFINITY ? std::string("null") : number(v); };
  Item item{
      name, show(l.rlim_cur) + (l.rlim_max != l.rlim_cur ? ", at most " + show(l.rlim_max) : ""), "", Verdict::Ok, {}};
  const std::string unit = bytes ? "_bytes" : "";
  item.values = {{"soft" + unit, json(l.rlim_cur)}, {"hard" + unit, json(l.rlim_max)}};
  if (l.rlim_cur != RLIM_INFINITY && l.rlim_cur < enough) {
    item.verdict = Verdict::Note;
    item.hint = hint;
  }
  items.push_back(std::move(item));
}

// The I/O path for offloaded states in this folder, found as a run finds it.
Item offloading(const std::string& folder) {
  Item way{"offload to files", "", "", Verdict::Ok, {}};
  const std::string kind = storage::file_system_of(folder), notice = storage::folder_notice(folder);
  std::string path = "null", leftovers = "null";
  try {
    const auto file = storage::SwapFile::create(folder, static_cast<std::int64_t>(kMiB), {}, "zero doctor");
    way.found = file->description() + ", on " + kind;
    path = json_quote(file->description());
    if (!notice.empty()) {
      way.verdict = Verdict::Note;
      way.hint = notice;
    }
    const auto left = storage::find_leftovers(folder, false);
    const auto dead = std::count_if(left.begin(), left.end(), [](const auto& one) { return one.kept_because.empty(); });
    leftovers = number(static_cast<std::uint64_t>(dead));
    if (dead > 0) {
      way.verdict = Verdict::Note;
      way.hint += (way.hint.empty() ? "" : "; ") + leftovers + " folders of dead runs are left in " + folder +
                  ": zero doctor --clean --path " + folder;
    }
  } catch (const Error& error) {
    way.found = error.what();
    way.verdict = Verdict::Note;
    way.hint = "name the folder for offloaded files with --path DIR";
  }
  way.values = {{"path", path},
                {"file_system", kind.empty() ? "null" : json_quote(kind)},
                {"notice", notice.empty() ? "null" : json_quote(notice)},
                {"leftovers", leftovers}};
  return way;
}

void files(std::vector<Item>& items, const std::string& folder) {
  const int ring = launch::try_io_uring();
  Item io{"io_uring",
          ring ? std::strerror(ring) : "works",
          "",
          Verdict::Ok,
          {{"works", boolean(!ring)}, {"errno", std::to_string(ring)}}};
  if (ring) {
    io.verdict = Verdict::Note;
    io.hint = ring == ENOSYS ? "the kernel has none; offload to files then uses threads, which is slower on fast disks"
                             : "not allowed here (sysctl kernel.io_uring_disabled=0, or a seccomp profile that allows "
                               "it); offload to files then uses threads";
  }
  items.push_back(std::move(io));

  const launch::DirectIo direct = launch::try_direct_io(folder, kDirectBytes);
  std::error_code error;
  const fs::path whole = fs::absolute(folder, error);
  Item disk{"O_DIRECT", "", "", Verdict::Ok, {}};
  disk.values = {{"path", json_quote(whole.lexically_normal().string())},
                 {"works", boolean(!direct.error)},
                 {"unnamed_files", boolean(direct.unnamed)}};
  if (direct.error) {
    disk.found = direct.step + ": " + std::strerror(direct.error) + " in " + folder;
    disk.verdict = Verdict::Note;
    disk.hint = direct.error == ENOSPC || direct.error == EACCES || direct.error == EROFS || direct.error == ENOENT
                    ? "name the folder for offloaded files with --path DIR"
                    : "this file system has no direct I/O: offload to another one, or pay with the page cache's memory";
  } else {
    char text[160];
    std::snprintf(text, sizeof text, "works, align %zu, write %.2f GB/s, read %.2f GB/s", direct.alignment,
                  direct.write_bytes_per_s / 1e9, direct.read_bytes_per_s / 1e9);
    disk.found = text;
    std::snprintf(text, sizeof text, "%.0f", direct.write_bytes_per_s);
    disk.values.emplace_back("write_bytes_per_s", text);
    std::snprintf(text, sizeof text, "%.0f", direct.read_bytes_per_s);
    disk.values.emplace_back("read_bytes_per_s", text);
    disk.values.emplace_back("alignment_bytes", number(direct.alignment));
  }
  items.push_back(std::move(disk));

  items.push_back(offloading(folder));

  const launch::SpaceFacts space = launch::space_of(folder);
  Item room{"free space",
            space.error ? std::strerror(space.error)
                        : human_bytes(space.free_bytes) + " of " + human_bytes(space.total_bytes) + " in " + folder,
            "",
            Verdict::Ok,
            {{"free_bytes", number(space.free_bytes)}, {"total_bytes", number(space.total_bytes)}}};
  if (space.error || space.free_bytes < kGiB) {
    room.verdict = Verdict::Note;
    room.hint = "checkpoints and offloaded files need more: name another folder with --path DIR";
  }
  items.push_back(std::move(room));

  const fs::path temporary = base::temporary_folder();
  const int temporary_error = launch::try_file_in(temporary);
  Item temp{"temporary folder",
            temporary_error ? temporary.string() + ": " + std::strerror(temporary_error) : temporary.string(),
            "",
            Verdict::Ok,
            {{"path", json_quote(temporary.string())}, {"works", boolean(!temporary_error)}}};
  if (temporary_error) {
    temp.verdict = Verdict::Note;
    temp.hint =
        "runs need none; tokens of text without --token-cache, traces that are only measured, and zero explain "
        "--live are written there: set TMPDIR to a writable folder";
  }
  items.push_back(std::move(temp));

  limit(items, "open files", RLIMIT_NOFILE, false, 1024,
        "a rank opens up to 3 for each rank of its run, and its files: ulimit -n 4096");
  limit(items, "locked memory", RLIMIT_MEMLOCK, true, 64 * kMiB,
        "registered I/O buffers stay small: ulimit -l unlimited, or memlock in /etc/security/limits.conf");
}

void devices(std::vector<Item>& items) {
  const launch::GpuFacts gpus = launch::gpu_facts();
  Item gpu{"GPUs", "", "", Verdict::Ok, {}};
  std::string names = "[";
  for (std::size_t i = 0; i < gpus.names.size(); ++i) {
    gpu.found += (i ? ", " : "") + gpus.names[i] + " " + human_bytes(gpus.bytes[i]);
    names += (i ? ", " : "") + std::string("{\"name\": ") + json_quote(gpus.names[i]) +
             ", \"bytes\": " + number(gpus.bytes[i]) + "}";
  }
  gpu.values = {{"count", number(gpus.names.size())},
                {"devices", names + "]"},
                {"driver", gpus.driver.empty() ? "null" : json_quote(gpus.driver)},
                {"error", gpus.error.empty() ? "null" : json_quote(gpus.error)}};
  if (gpus.names.empty()) {
    gpu.found = "none: " + gpus.error;
    gpu.verdict = Verdict::Note;
    gpu.hint = gpus.driver.empty()
                   ? "ranks run on the CPU; a GPU needs NVIDIA's driver (apt: nvidia-driver)"
                   : "the kernel's driver is there: give the container the devices, or look at CUDA_VISIBLE_DEVICES";
  }
  if (!gpus.driver.empty()) gpu.found += ", driver " + gpus.driver;
  items.push_back(std::move(gpu));
}

void processes(std::vector<Item>& items) {
  const int pidfd = launch::try_pidfd();
  Item death{"pidfd", pidfd ? std::strerror(pidfd) : "works", "", Verdict::Ok, {{"works", boolean(!pidfd)}}};
  if (pidfd) {
    death.verdict = Verdict::Note;
    death.hint = "zero run then waits with a thread per rank: Linux 5.3 or later has it";
  }
  items.push_back(std::move(death));
  const int reaper = launch::try_subreaper();
  Item orphans{"subreaper", reaper ? std::strerror(reaper) : "works", "", Verdict::Ok, {{"works", boolean(!reaper)}}};
  if (reaper) {
    orphans.verdict = Verdict::Note;
    orphans.hint = "processes that ranks start in new sessions can then only be found by their environment";
  }
  items.push_back(std::move(orphans));

  Item ports{"ports", "", "", Verdict::Ok, {}};
  try {
    const int port = launch::free_port();
    ports.found = "loopback works (" + std::to_string(port) + " is free)";
    ports.values = {{"loopback", "true"}, {"free_port", std::to_string(port)}};
  } catch (const Error& error) {
    ports.found = error.what();
    ports.values = {{"loopback", "false"}, {"free_port", "null"}};
    ports.verdict = Verdict::Missing;
    ports.hint = "ranks need the loopback interface: ip link set lo up";
  }
  items.push_back(std::move(ports));

  const fs::path ssh = launch::in_path("ssh");
  Item remote{"ssh",
              ssh.empty() ? "not found" : ssh.string(),
              "",
              Verdict::Ok,
              {{"path", ssh.empty() ? "null" : json_quote(ssh.string())}}};
  if (ssh.empty()) {
    remote.verdict = Verdict::Note;
    remote.hint = "only several hosts need it: apt install openssh-client";
  }
  items.push_back(std::move(remote));
}

std::string json_document(const std::vector<Item>& items, int code) {
  std::string text =
      std::string("{\"schema\": \"zero.doctor/1\", \"exit_code\": ") + std::to_string(code) + ", \"items\": [";
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Item& item = items[i];
    text += (i ? ", " : "") + std::string("{\"item\": ") + json_quote(item.name) +
            ", \"found\": " + json_quote(item.found) + ", \"verdict\": \"" + word(item.verdict) +
            "\", \"hint\": " + (item.hint.empty() ? "null" : json_quote(item.hint)) + ", \"values\": {";
    for (std::size_t k = 0; k < item.values.size(); ++k)
      text += (k ? ", " : "") + json_quote(item.values[k].first) + ": " + item.values[k].second;
    text += "}}";
  }
  return text + "]}\n";
}

std::string table(const std::vector<Item>& items, const cli::Global& global) {
  using Narrow = report::Column::Narrow;
  const report::Terminal terminal = report::describe_terminal(1, global.color);
  const auto columns = static_cast<std::size_t>(terminal.columns);
  report::Table rows({{"item", report::Align::Left, Narrow::Keep},
                      {"found", report::Align::Left, Narrow::Wrap, 20},
                      {"verdict", report::Align::Left, Narrow::Keep}});
  for (const Item& item : items) rows.row({item.name, item.found, word(item.verdict)});
  std::string text = rows.render(columns, terminal.utf8);
  bool first = true;
  for (const Verdict v : {Verdict::Missing, Verdict::Note}) {
    for (const Item& item : items) {
      if (item.verdict != v) continue;
      if (std::exchange(first, false)) text += "\n";
      for (const std::string& line : report::wrap(std::string(word(v)) + ": " + item.name + ": " + item.hint, columns))
        text += line + "\n";
    }
  }
  return text;
}

// `zero doctor --clean`: removes private folders of dead runs.
int clean(const std::string& folder, const cli::Global& global) {
  const auto found = storage::find_leftovers(folder, true);
  std::string text = "{\"schema\": \"zero.doctor.clean/1\", \"path\": " + json_quote(folder) + ", \"found\": [";
  report::Table rows({{"folder", report::Align::Left, report::Column::Narrow::Wrap, 20},
                      {"size", report::Align::Right},
                      {"", report::Align::Left, report::Column::Narrow::Wrap, 20}});
  for (const auto& one : found) {
    const auto bytes = static_cast<std::uint64_t>(one.bytes);
    text += (&one == &found.front() ? "" : ", ") + std::string("{\"folder\": ") + json_quote(one.path) +
            ", \"bytes\": " + number(bytes) + ", \"removed\": " + boolean(one.removed) +
            ", \"kept_because\": " + (one.removed ? "null" : json_quote(one.kept_because)) + "}";
    rows.row({one.path, human_bytes(bytes), one.removed ? "removed" : "kept: " + one.kept_because});
  }
  const report::Terminal terminal = report::describe_terminal(1, global.color);
  if (global.json) {
    cli::print_result(text + "]}\n");
  } else if (found.empty()) {
    cli::print_result("no folders of offloaded files in " + folder + "\n");
  } else {
    cli::print_result(rows.render(static_cast<std::size_t>(terminal.columns), terminal.utf8));
  }
  return 0;
}

}  // namespace

int zero_doctor(int argc, char** argv) {
  std::string folder = ".";
  cli::Command c("doctor", "what this machine has, and what is missing", "[options]",
                 "  zero doctor --path /mnt/nvme\n");
  bool cleans = false;
  c.option("--path,--nvme-path", folder, "DIR", "folder for offloaded files and checkpoints (the working directory)");
  c.flag("--clean", cleans, "only remove files that dead runs of this host left in the folder");
  if (!c.parse(argc, argv)) return 0;
  if (cleans) return clean(folder, c.global());
  std::vector<Item> items;
  libraries(items);
  processors(items);
  memory(items);
  files(items, folder);
  devices(items);
  processes(items);
  int code = 0;
  for (const Item& item : items)
    if (item.verdict == Verdict::Missing) code = 1;
  cli::print_result(c.global().json ? json_document(items, code) : table(items, c.global()));
  return code;
}
