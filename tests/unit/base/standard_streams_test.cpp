// A process that was started without stdin, stdout and stderr: none of its files takes their descriptors, so nothing
// that is printed goes into a file.
#include "base/standard_streams.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "base/memory_file.h"
#include "formats/files.h"
#include "observe/csv_file.h"
#include "observe/event_file.h"
#include "observe/trace.h"
#include "storage/fault_source.h"
#include "storage/storage_file.h"
#include "support/descriptors.h"
#include "support/folder.h"
#include "tools/launch/local/rank_process.h"

namespace zero::base::standard_streams_test {
namespace {

using test::TempFolder;

// What body() returns in a child whose descriptors 0 to 2 are closed.
std::string without_streams(const std::function<std::string()>& body) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    for (const int fd : {0, 1, 2}) ::close(fd);
    std::string text;
    try {
      text = body();
    } catch (const std::exception& error) {
      text = error.what();
    }
    [[maybe_unused]] const auto n = ::write(ends[1], text.data(), text.size());
    _exit(0);
  }
  ::close(ends[1]);
  std::string all;
  char bytes[4096];
  for (ssize_t n; (n = ::read(ends[0], bytes, sizeof bytes)) > 0;) all.append(bytes, static_cast<std::size_t>(n));
  ::close(ends[0]);
  waitpid(child, nullptr, 0);
  return all;
}

// The descriptors 0 to 2 that are open, and not on /dev/null.
std::string taken() {
  std::string all;
  for (const char* fd : {"0", "1", "2"}) {
    char name[4096] = {};
    if (readlink((std::string("/proc/self/fd/") + fd).c_str(), name, sizeof name - 1) > 0 &&
        std::string(name) != "/dev/null")
      all += std::string(fd) + " is " + name + "; ";
  }
  return all;
}

class NoUnnamedFiles final : public storage::FaultSource {
 public:
  int open_unnamed() override { return EOPNOTSUPP; }
};

TEST(StandardStreams, FilesThatAreWrittenLeaveThemFree) {
  const TempFolder folder;
  const auto expect_free = [](const char* what, const std::function<std::string()>& body) {
    EXPECT_EQ(without_streams(body), "") << what;
  };
  expect_free("an unnamed swap file", [&] {
    const storage::StorageFile file(folder.text(), "rank 0/1", nullptr);
    return taken();
  });
  expect_free("a named swap file", [&] {
    NoUnnamedFiles faults;
    const storage::StorageFile file(folder.text(), "rank 0/1", &faults);
    return taken();
  });
  expect_free("files of a checkpoint", [&] {
    const auto into = formats::Folder::make(formats::system_files(), folder.file("checkpoint"));
    const auto made = into.create("a");
    const auto again = into.open_to_write("a");
    const auto read = into.open_file("a");
    const int lock = formats::system_files().open_lock_at(into.fd(), "lock");
    return (lock > 2 ? "" : "lock ") + taken();
  });
  expect_free("memory", [] {
    const int fd = open_memory_file("zero-test", 0);
    return (fd > 2 ? "" : "none ") + taken();
  });
  expect_free("TensorBoard's events", [&] {
    const observe::EventFile file(folder.path() / "events");
    return taken();
  });
  expect_free("a trace", [&] {
    observe::Trace trace;
    trace.start({folder.file("trace.json"), 0, 1, observe::trace_now(), "run"});
    return taken();
  });
  expect_free("CSV files", [&] {
    observe::CsvFiles files(folder.path() / "csv");
    files.write("Train/loss", 1, 2);
    return taken();
  });
}

TEST(StandardStreams, AreFilledOnceAndOnlyWhereClosed) {
  EXPECT_EQ(without_streams([] {
              fill_standard_streams();
              const auto before = test::open_descriptors();
              fill_standard_streams();
              return std::to_string(::write(1, "x", 1)) + std::to_string(::read(0, nullptr, 0)) + taken() +
                     (test::open_descriptors() == before ? "" : "descriptors are lost");
            }),
            "10");
}

TEST(StandardStreams, ARanksOutputArrivesFromALauncherWithoutStreams) {
  const auto read_all = [](int fd) {
    std::string all;
    char byte;
    pollfd ready{fd, POLLIN, 0};
    while (poll(&ready, 1, 20000) > 0 && ::read(fd, &byte, 1) == 1) all += byte;
    return all;
  };
  EXPECT_EQ(without_streams([&] {
              launch::SpawnSettings settings;
              settings.path = "/bin/sh";
              settings.arguments = {"sh", "-c", "read line; echo to out; echo to err >&2"};
              const auto process = launch::spawn(settings);
              const auto text = read_all(process.out) + read_all(process.err);
              waitpid(process.pid, nullptr, 0);
              return text + taken();
            }),
            "to out\nto err\n");
}

}  // namespace
}  // namespace zero::base::standard_streams_test
