// What somebody else has put where logs are written is neither followed nor written.
#include "tools/launch/supervise/log_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include <zero/errors.h>

#include "support/file_text.h"
#include "support/folder.h"
#include "support/process.h"

namespace zero::launch::log_folder_test {
namespace {

namespace fs = std::filesystem;
using test::file_text;

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const IoError& error) {
    return error.what();
  }
  return "accepted";
}

void put(const base::Descriptor& file, const std::string& text) {
  EXPECT_EQ(::write(file.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

TEST(LogFolder, AppendsAndRewrites) {
  const test::TempFolder place;
  const std::string path = place.file("logs/run-1");
  const mode_t before = umask(0);
  for (int round = 0; round < 2; ++round) {  // a launcher on another host finds the folder there
    const LogFolder folder(path);
    put(folder.append("rank-0.out"), "line\n");
    put(folder.rewrite("rank-0.collectives"), "ring\n");
  }
  umask(before);
  EXPECT_EQ(file_text(path + "/rank-0.out"), "line\nline\n");
  EXPECT_EQ(file_text(path + "/rank-0.collectives"), "ring\n");
  EXPECT_EQ(fs::status(path).permissions(), fs::perms(0755)) << "others can put nothing there";
}

TEST(LogFolder, FollowsNoLink) {
  const test::TempFolder place;
  const std::string victim = place.file("victim"), other = place.file("other");
  for (const auto& file : {victim, other}) std::ofstream(file) << "mine\n";
  fs::create_directory(place.file("elsewhere"));
  fs::create_symlink(place.file("elsewhere"), place.file("run-1"));
  EXPECT_NE(refusal([&] { LogFolder{place.file("run-1")}; }).find("it is a link or a file, expected a folder"),
            std::string::npos);
  fs::create_directory(place.file("run-2"));
  const LogFolder folder(place.file("run-2"));
  fs::create_symlink(victim, place.file("run-2/symbolic"));
  fs::create_hard_link(other, place.file("run-2/hard"));
  ASSERT_EQ(mkfifo(place.file("run-2/fifo").c_str(), 0666), 0);
  for (const char* name : {"symbolic", "hard", "fifo"}) {
    EXPECT_EQ(refusal([&] { folder.append(name); }).find("[--log-dir] cannot write to " + place.file("run-2/")), 0u)
        << name;
    EXPECT_EQ(refusal([&] { folder.rewrite(name); }).find("[--log-dir] cannot write to " + place.file("run-2/")), 0u)
        << name;
  }
  EXPECT_EQ(file_text(victim) + file_text(other), "mine\nmine\n");
}

TEST(LogFolder, OfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to make a folder of another user";
  const test::TempFolder place;
  fs::create_directory(place.file("run-1"));
  ASSERT_EQ(chown(place.file("run-1").c_str(), 65534, 65534), 0);
  EXPECT_NE(
      refusal([&] { LogFolder{place.file("run-1")}; }).find("the folder belongs to user 65534, expected one of user 0"),
      std::string::npos);
  EXPECT_TRUE(fs::is_empty(place.file("run-1")));
  const LogFolder folder(place.file("run-2"));
  std::ofstream(place.file("run-2/rank-0.out")) << "theirs";
  ASSERT_EQ(chown(place.file("run-2/rank-0.out").c_str(), 65534, 65534), 0);
  EXPECT_NE(refusal([&] { folder.append("rank-0.out"); }), "accepted");
  EXPECT_EQ(file_text(place.file("run-2/rank-0.out")), "theirs");
}

}  // namespace
}  // namespace zero::launch::log_folder_test
