// `zero doctor`: the document's structure, agreement with the system's own information, and consistency of verdict and
// exit code.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "support/process.h"

namespace zero::test::doctor_test {
namespace {

using Json = nlohmann::json;
const std::string kZero = ZERO_BINARY_DIR "/bin/zero";

struct Doctor {
  explicit Doctor(std::vector<std::string> options = {}, std::vector<std::string> environment = {}) {
    Process::Settings settings;
    settings.arguments = {kZero, "doctor", "--json"};
    settings.arguments.insert(settings.arguments.end(), options.begin(), options.end());
    settings.environment = std::move(environment);
    Process p(settings);
    code = p.wait(60);
    err = p.err;
    EXPECT_EQ(lines(p.out).size(), 1u) << p.out << p.err;
    document = Json::parse(p.out);
  }
  const Json& item(const std::string& name) const {
    for (const Json& i : document["items"])
      if (i["item"] == name) return i;
    ADD_FAILURE() << "no item " << name;
    static const Json none{{"values", Json::object()}, {"verdict", ""}, {"found", ""}, {"hint", nullptr}};
    return none;
  }
  const Json& value(const std::string& name, const std::string& key) const {
    static const Json none;
    const Json& values = item(name)["values"];
    EXPECT_TRUE(values.contains(key)) << name << " " << key;
    return values.contains(key) ? values[key] : none;
  }
  int code = 0;
  std::string err;
  Json document;
};

std::uint64_t meminfo_total() {
  std::ifstream in("/proc/meminfo");
  std::string name;
  std::uint64_t kib = 0;
  in >> name >> kib;
  EXPECT_EQ(name, "MemTotal:");
  return kib * 1024;
}

TEST(Doctor, DocumentHasTheFormItPromises) {
  const Doctor d;
  EXPECT_EQ(d.document["schema"], "zero.doctor/1");
  EXPECT_EQ(d.document["exit_code"], d.code);
  std::set<std::string> names;
  bool missing = false;
  for (const Json& i : d.document["items"]) {
    EXPECT_TRUE(names.insert(i["item"]).second) << i;
    EXPECT_FALSE(i["found"].get<std::string>().empty()) << i;
    EXPECT_TRUE(i["values"].is_object()) << i;
    const std::string verdict = i["verdict"];
    EXPECT_TRUE(verdict == "ok" || verdict == "note" || verdict == "missing") << i;
    EXPECT_EQ(i["hint"].is_null(), verdict == "ok") << "what is not ok says how to get it: " << i;
    missing |= verdict == "missing";
  }
  for (const char* name : {"zero",
                           "libzero",
                           "libtorch",
                           "NCCL plug-in",
                           "CPU",
                           "CPU features",
                           "cores",
                           "OMP threads",
                           "NUMA nodes",
                           "memory",
                           "/dev/shm",
                           "memfd",
                           "io_uring",
                           "O_DIRECT",
                           "offload to files",
                           "free space",
                           "temporary folder",
                           "open files",
                           "locked memory",
                           "GPUs",
                           "pidfd",
                           "subreaper",
                           "ports",
                           "ssh"})
    EXPECT_TRUE(names.count(name)) << name;
  EXPECT_EQ(d.code, missing ? 1 : 0);
  EXPECT_EQ(d.err, "");
}

TEST(Doctor, AgreesWithTheSystem) {
  const Doctor d({}, {"OMP_NUM_THREADS=3"});
  EXPECT_EQ(d.value("memory", "total_bytes"), meminfo_total());
  EXPECT_LE(d.value("memory", "available_bytes"), d.value("memory", "total_bytes"));
  EXPECT_EQ(d.value("cores", "online"), sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  EXPECT_EQ(d.value("cores", "allowed"), CPU_COUNT(&set));
  EXPECT_GE(d.value("cores", "usable"), 1);
  EXPECT_LE(d.value("cores", "usable"), CPU_COUNT(&set));
  EXPECT_EQ(d.value("OMP threads", "omp_num_threads"), "3");
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  EXPECT_EQ(d.value("open files", "soft"), files.rlim_cur);
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0) {
    EXPECT_EQ(d.value("/dev/shm", "total_bytes"), static_cast<std::uint64_t>(shm.f_blocks) * shm.f_frsize);
  }
  // The tests of `zero run` need these, so they must be there.
  EXPECT_EQ(d.value("memfd", "works"), true);
  EXPECT_EQ(d.value("ports", "loopback"), true);
#if defined(__x86_64__)
  __builtin_cpu_init();
  EXPECT_EQ(d.value("CPU features", "avx2"), static_cast<bool>(__builtin_cpu_supports("avx2")));
  EXPECT_EQ(d.value("CPU features", "avx512"), static_cast<bool>(__builtin_cpu_supports("avx512f")));
#endif
}

TEST(Doctor, SeesTheAffinityItWasGiven) {
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int c = 0; c < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++c)
    if (CPU_ISSET(c, &set)) CPU_SET(c, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  const Doctor d;
  ASSERT_EQ(sched_setaffinity(0, sizeof set, &set), 0);
  EXPECT_EQ(d.value("cores", "allowed"), 1);
  EXPECT_EQ(d.value("cores", "usable"), 1);
}

TEST(Doctor, FindsLibzeroAndItsLibtorch) {
  const Doctor d;
  const bool built = std::filesystem::exists(ZERO_BINARY_DIR "/lib/libzero.so.0") &&
                     std::filesystem::exists(ZERO_BINARY_DIR "/bin/zero-torch");
  EXPECT_EQ(d.item("libzero")["verdict"] == "ok", built) << d.item("libzero");
  if (!built) {
    EXPECT_EQ(d.code, 1);
    GTEST_SKIP() << "libzero.so and zero-torch are not built here";
  }
  EXPECT_TRUE(
      std::filesystem::equivalent(d.value("libzero", "path").get<std::string>(), ZERO_BINARY_DIR "/lib/libzero.so.0"));
  EXPECT_EQ(d.item("libtorch")["verdict"], "ok") << d.item("libtorch");
  const auto version = d.value("libtorch", "version").get<std::string>();
  EXPECT_EQ(version.rfind(ZERO_TORCH_MINOR ".", 0), 0u) << version;
  const auto mechanisms = d.item("libtorch's mechanisms");
  EXPECT_EQ(mechanisms["verdict"], "ok") << mechanisms;
  EXPECT_EQ(d.value("libtorch's mechanisms", "saved tensors"), nullptr) << mechanisms;
  EXPECT_TRUE(std::filesystem::exists(d.value("libtorch", "path").get<std::string>() + "/lib/libtorch_cpu.so"));
}

TEST(Doctor, ChecksTheFolderItIsGiven) {
  const std::string folder = temporary_folder();
  const Doctor good({"--path", folder});
  EXPECT_EQ(good.value("O_DIRECT", "path"), folder);
  EXPECT_TRUE(std::filesystem::is_empty(folder)) << "nothing is left behind";
  if (good.value("O_DIRECT", "works") == true) {
    EXPECT_GT(good.value("O_DIRECT", "write_bytes_per_s"), 0);
    EXPECT_GT(good.value("O_DIRECT", "read_bytes_per_s"), 0);
  }
  const Doctor none({"--path", folder + "/none"});
  EXPECT_EQ(none.item("O_DIRECT")["verdict"], "note");
  EXPECT_NE(none.item("O_DIRECT")["found"].get<std::string>().find("No such file or directory"), std::string::npos);
  EXPECT_EQ(none.item("free space")["verdict"], "note");
}

TEST(Doctor, SaysHowStateWouldBeOffloadedToTheFolder) {
  const std::string folder = temporary_folder();
  const Doctor good({"--nvme-path", folder});
  const auto path = good.value("offload to files", "path").get<std::string>();
  if (good.value("io_uring", "works") == false) {
    EXPECT_EQ(path.find("io_uring"), std::string::npos) << path;
  }
  EXPECT_TRUE(path.find("io_uring") == 0 || path.find("pread/pwrite") != std::string::npos) << path;
  EXPECT_TRUE(path.find("O_DIRECT") != std::string::npos || path.find("page cache") != std::string::npos) << path;
  EXPECT_TRUE(good.value("offload to files", "file_system").is_string());
  EXPECT_EQ(good.value("offload to files", "leftovers"), 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder)) << "nothing is left behind";
  const Doctor none({"--path", folder + "/none"});
  EXPECT_EQ(none.item("offload to files")["verdict"], "note");
  EXPECT_TRUE(none.value("offload to files", "path").is_null());
  struct statfs facts {};
  if (statfs("/dev/shm", &facts) == 0 && facts.f_type == 0x01021994 && access("/dev/shm", W_OK) == 0) {
    const Doctor memory({"--path", "/dev/shm"});
    EXPECT_EQ(memory.value("offload to files", "file_system"), "tmpfs");
    EXPECT_EQ(memory.item("offload to files")["verdict"], "note");
    EXPECT_NE(memory.value("offload to files", "notice").get<std::string>().find("memory"), std::string::npos);
  }
}

TEST(Doctor, CleansUpAfterDeadRunsOnly) {
  const std::string folder = temporary_folder();
  char host[256] = {};
  ASSERT_EQ(gethostname(host, sizeof host - 1), 0);
  const auto make = [&](const std::string& owner) {
    const auto path = folder + "/zero-swap@" + owner + "@7";
    std::filesystem::create_directory(path);
    std::ofstream(path + "/state") << std::string(100000, 'x');
    return path;
  };
  // Process 1 lives, but did not begin at tick 1 after the machine did.
  const auto dead = make(std::string(host) + "@1@1@run"), other = make("another-host@1@1@run");
  EXPECT_EQ(Doctor({"--path", folder}).value("offload to files", "leftovers"), 1);
  EXPECT_TRUE(std::filesystem::exists(dead)) << "doctor alone removes nothing";
  Process::Settings settings;
  settings.arguments = {kZero, "doctor", "--clean", "--nvme-path", folder, "--json"};
  Process p(settings);
  ASSERT_EQ(p.wait(60), 0) << p.err;
  const auto document = Json::parse(p.out);
  EXPECT_EQ(document["schema"], "zero.doctor.clean/1");
  ASSERT_EQ(document["found"].size(), 2u) << p.out;
  for (const auto& one : document["found"]) EXPECT_EQ(one["removed"], one["folder"] == dead) << p.out;
  EXPECT_FALSE(std::filesystem::exists(dead));
  EXPECT_TRUE(std::filesystem::exists(other + "/state"));
  settings.arguments = {kZero, "doctor", "--clean", "--path", folder + "/none"};
  Process none(settings);
  EXPECT_EQ(none.wait(60), 5) << none.err;
}

TEST(Doctor, AsksTheDriverAndSurvivesIt) {
  const std::string path = std::string("LD_LIBRARY_PATH=") + ZERO_BINARY_DIR + "/tests/fake_cuda";
  const Doctor two({}, {path});
  EXPECT_EQ(two.item("GPUs")["verdict"], "ok") << two.item("GPUs");
  EXPECT_EQ(two.value("GPUs", "count"), 2);
  EXPECT_EQ(two.value("GPUs", "devices")[1]["name"], "Fake GPU 1");
  EXPECT_EQ(two.value("GPUs", "devices")[1]["bytes"], 1ull << 35);
  EXPECT_EQ(two.item("GPUs")["found"].get<std::string>().find("Fake GPU 0 16.0GiB, Fake GPU 1 32.0GiB"), 0u);
  for (const auto& [mode, word] :
       std::vector<std::pair<std::string, std::string>>{{"error", "cuInit says 100"}, {"crash", "crashed"}}) {
    const Doctor broken({}, {path, "FAKE_CUDA=" + mode});
    EXPECT_EQ(broken.item("GPUs")["verdict"], "note");
    EXPECT_EQ(broken.value("GPUs", "count"), 0);
    EXPECT_NE(broken.value("GPUs", "error").get<std::string>().find(word), std::string::npos) << broken.item("GPUs");
  }
}

// A run works without a temporary folder, so it is no reason to fail.
TEST(Doctor, ATemporaryFolderIsNotNeeded) {
  const std::string none = "TMPDIR=" + temporary_folder() + "/none";
  const Doctor d({}, {none});
  EXPECT_EQ(d.item("temporary folder")["verdict"], "note");
  EXPECT_EQ("TMPDIR=" + d.value("temporary folder", "path").get<std::string>(), none);
  EXPECT_NE(d.item("temporary folder")["hint"].get<std::string>().find("TMPDIR"), std::string::npos);
  EXPECT_EQ(d.code, Doctor({}, {}).code);
  Process run(Process::Settings{{ZERO_BINARY_DIR "/bin/zero", "run", "-n", "2", "/bin/true"}, {none}, "", -1});
  EXPECT_EQ(run.wait(), 0) << run.err;
}

TEST(Doctor, TableFitsTheWidth) {
  for (const int width : {60, 80}) {
    Process::Settings settings;
    settings.arguments = {kZero, "doctor"};
    settings.environment = {"COLUMNS=" + std::to_string(width), "LANG=C", "LC_ALL=C"};
    Process p(settings);
    const int code = p.wait(60);
    EXPECT_TRUE(code == 0 || code == 1) << p.err;
    EXPECT_NE(p.out.find("verdict\n"), std::string::npos) << p.out;
    for (const std::string& line : lines(p.out)) EXPECT_LE(static_cast<int>(line.size()), width) << line;
    EXPECT_EQ(p.out.find("missing: ") != std::string::npos, code == 1) << p.out;
    EXPECT_EQ(p.out.find('\033'), std::string::npos);
  }
}

}  // namespace
}  // namespace zero::test::doctor_test
