// Names inside files that would lead out of their directory, or to something that is no file, are refused wherever a
// file names another: manifest, SUMS, latest, the index of safetensors, .metadata, DeepSpeed's latest, records of zip
// files. What they would lead to exists and is right, so that only the rule keeps a reader from it.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <iostream>

#include "interchange/source.h"
#include "support/file_text.h"
#include "unit/formats/checkpoint_samples.h"
#include "unit/interchange/weight_files.h"
#include "unit/interchange/zip_samples.h"

namespace zero::test::hostile_names_test {
namespace {
namespace fs = std::filesystem;
using namespace std::string_literals;

// `name`: of a right file in the folder. The same bytes are at `outside` (absolute), ../NAME, sub/NAME and others.
std::vector<std::string> hostile_names(const std::string& name, const std::string& outside) {
  auto upper = name;
  for (auto& c : upper) c = static_cast<char>(std::toupper(c));
  std::string up;
  for (int i = 0; i < 1365; ++i) up += "../";
  return {// Paths.
          "", ".", "..", "../" + name, "../../" + name, "./" + name, name + "/", name + "/.", name + "/..", "/",
          outside, "/" + outside, "/." + outside, "sub/" + name, "sub/../" + name, "sub/../../" + name, "sub//" + name,
          "../" + fs::path(outside).filename().string(), up + outside.substr(1), up,
          // Files that are none.
          "/etc/passwd", "/dev/zero", "/dev/null", "/dev/stdin", "/dev/fd/0", "/proc/self/environ", "/proc/self/mem",
          // Other systems' paths.
          "..\\" + name, "C:\\" + name, "C:" + name, "\\\\host\\share\\" + name, name + ":stream", "CON", "NUL.txt",
          // Bytes that end a name, a line or a terminal's patience.
          name + "\0.txt"s, "\0"s, "\0"s + name, name + "\n", name + "\r\n", "\n", "\x1b[2J" + name, name + "\x7f",
          " " + name, name + " ", "\t" + name, name + "\t",
          // What shells and programs take for something else.
          "~/" + name, "~", "$HOME/" + name, "`id`", "$(id)", name + ";id", name + "|cat", "*", "?", "-rf", "--help",
          "%2e%2e/" + name, "..%2f" + name, "file://" + outside, "http://127.0.0.1/" + name,
          // Hidden names, and our own.
          ".hidden", "." + name, ".lock", ".tmp-00000000000000000000000000000000", ".del-x", "...", "..a", "a..",
          "a..b",
          // Letters that look like others, and bytes that are none.
          "\xc0\xae\xc0\xae/" + name, "\xff\xfe", "\xe2\x80\xa4\xe2\x80\xa4/" + name, "..\xef\xbc\x8f" + name,
          "\xe2\x80\xae" + name, "\xc3\xbc", "\xed\xa0\x80", upper,
          // Lengths.
          std::string(256, 'a'), std::string(4096, 'a'), std::string(5000, 'a') + "/" + name};
}

// A place where a file names another.
struct Place {
  const char* what;
  std::string name;                                              // the right one
  std::function<void(const fs::path& folder)> make;              // a right set of files
  std::function<void(const fs::path&, const std::string&)> put;  // replaces the name
  std::function<void(const fs::path&)> read;                     // throws, or what it reads is right
  std::vector<std::string> files;                                // that must be regular ones
};

std::string escaped(const std::string& name) {
  std::string text;
  for (const char c : name) {
    char code[8];
    std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned char>(c));
    if (static_cast<unsigned char>(c) < 0x20)
      text += code;
    else
      text += (c == '"' || c == '\\' ? "\\" : "") + std::string(1, c);
  }
  return text;
}

void replace(const fs::path& file, const std::string& old, const std::string& text) {
  auto all = file_text(file);
  auto at = all.find(old);
  ASSERT_NE(at, std::string::npos) << file << " has no " << old;
  for (; at != std::string::npos; at = all.find(old, at + text.size())) all.replace(at, old.size(), text);
  write_all(file, all);
}

void make_native(const fs::path& folder) {
  save_sample(formats::system_files(), folder.parent_path().string(), folder.filename().string(), 5);
}

void read_native(const fs::path& folder, const std::string& tag) {
  const auto loaded = load_sample(folder.parent_path().string(), tag);
  EXPECT_EQ(loaded.tag, folder.filename().string());
}

void put_in_manifest(const fs::path& folder, const std::string& old, const std::string& name) {
  const auto before = formats::hash_of(file_text(folder / "manifest.json"));
  replace(folder / "manifest.json", "\"" + old + "\"", "\"" + escaped(name) + "\"");
  replace(folder / "SUMS", before, formats::hash_of(file_text(folder / "manifest.json")));
}

std::vector<Place> places() {
  const auto golden = [](const char* name) { return fs::path(ZERO_SOURCE_DIR) / "tests/golden/interchange" / name; };
  const auto open = [](const fs::path& path) {
    const auto source = interchange::open_source(formats::system_files(), path.string());
    for (const auto& tensor : source->tensors()) {
      std::string bytes(static_cast<std::size_t>(formats::numel_of(tensor.shape) * formats::bits_of(tensor.dtype) / 8),
                        '\0');
      source->read(tensor, 0, formats::numel_of(tensor.shape), bytes.data());
    }
  };
  const auto rank = formats::rank_file_name(0);
  const std::string weights = "model-00001-of-00001.safetensors";
  std::vector<Place> all;
  all.push_back({"manifest",
                 rank,
                 make_native,
                 [rank](const fs::path& folder, const std::string& name) {
                   put_in_manifest(folder, rank, name);
                   replace(folder / "SUMS", "  " + rank, "  " + name);
                 },
                 [](const fs::path& folder) { read_native(folder, folder.filename()); },
                 {rank, "manifest.json", "SUMS"}});
  all.push_back(
      {"SUMS",
       rank,
       make_native,
       [rank](const fs::path& folder, const std::string& name) { replace(folder / "SUMS", "  " + rank, "  " + name); },
       [](const fs::path& folder) { read_native(folder, folder.filename()); },
       {}});
  all.push_back({"latest",
                 "checkpoint",
                 make_native,
                 [](const fs::path& folder, const std::string& name) {
                   const auto text = name + "\nseq 7\n";
                   write_all(folder.parent_path() / "latest", text + "xxh128 " + formats::hash_of(text) + "\n");
                 },
                 [](const fs::path& folder) {
                   read_native(folder, "");  // without a pointer, the checkpoints themselves are looked at
                   const auto root = formats::Folder::open(formats::system_files(), folder.parent_path().string());
                   const auto latest = formats::parse_latest(file_text(folder.parent_path() / "latest"), "latest");
                   (void)formats::require_whole(root.folder(latest.tag));
                 },
                 {}});
  all.push_back({"index",
                 weights,
                 [weights](const fs::path& folder) {
                   write_all(folder / weights, plain_file({{"w", plain_tensor<float>("F32", {3}, {1, 2, 3})}}));
                   write_all(folder / "model.safetensors.index.json",
                             R"({"metadata": {"total_size": 12}, "weight_map": {"w": ")" + weights + "\"}}");
                 },
                 [weights](const fs::path& folder, const std::string& name) {
                   replace(folder / "model.safetensors.index.json", weights, escaped(name));
                 },
                 open,
                 {weights, "model.safetensors.index.json"}});
  all.push_back(
      {".metadata",
       "__0_0.distcp",
       [golden](const fs::path& folder) { fs::copy(golden("dcp/step3"), folder, fs::copy_options::recursive); },
       [](const fs::path& folder, const std::string& name) {
         auto pickle = file_text(folder / ".metadata");
         const auto old = "\x8c\x0c__0_0.distcp"s;
         ASSERT_EQ(pickle.compare(2, 1, "\x95"), 0);
         const auto at = pickle.find(old);
         ASSERT_NE(at, std::string::npos);
         pickle.replace(at, old.size(), "X" + little(name.size(), 4) + name);
         pickle.replace(3, 8, little(pickle.size() - 11, 8));  // the length of the frame
         write_all(folder / ".metadata", pickle);
       },
       open,
       {"__0_0.distcp", ".metadata"}});
  all.push_back(
      {"DeepSpeed's latest",
       "step3",
       [golden](const fs::path& folder) { fs::copy(golden("deepspeed-2-bf16"), folder, fs::copy_options::recursive); },
       [](const fs::path& folder, const std::string& name) { write_all(folder / "latest", name); },
       open,
       {}});
  // A dictionary of one tensor of 4 elements in the record `name`.
  const auto zip = [](const std::string& name) {
    const auto storage = "(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0"s + "0X\3\0\0\0cpuK\4tQ"s;
    ZipSample sample;
    sample.zip64 = sample.descriptors = true;
    sample.records = {{"archive/data.pkl", "\x80\x02}X\1\0\0\0wctorch._utils\n_rebuild_tensor_v2\n("s + storage +
                                               "K\0K\4\x85K\1\x85\x89"s + "ccollections\nOrderedDict\n)RtRs."s},
                      {"archive/byteorder", "little"},
                      {name, std::string(16, 'x')},
                      {"archive/version", "3\n"}};
    return sample.bytes();
  };
  all.push_back({"zip",
                 "archive/data/0",
                 [zip](const fs::path& folder) { write_all(folder / "f.pt", zip("archive/data/0")); },
                 [zip](const fs::path& folder, const std::string& name) { write_all(folder / "f.pt", zip(name)); },
                 [open](const fs::path& folder) { open(folder / "f.pt"); },
                 {"f.pt"}});
  return all;
}

// The error, or "".
std::string error_of(const Place& place, const fs::path& folder) {
  const auto began = std::chrono::steady_clock::now();
  std::string text;
  try {
    place.read(folder);
  } catch (const IoError& e) {
    EXPECT_TRUE(e.code() == ExitCode::kCheckpoint || e.code() == ExitCode::kIo) << e.what();
    text = e.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5)) << "waited";
  EXPECT_EQ(text.find('\x1b'), std::string::npos) << text;
  EXPECT_LT(text.size(), 20000u);
  return text;
}

// A right set in a folder "checkpoint", and copies of its files wherever a name could lead to.
fs::path make(const Place& place, const TempFolder& root) {
  const auto folder = root.path() / "above" / "checkpoint";
  fs::create_directories(folder.parent_path());
  if (place.what != "manifest"s && place.what != "SUMS"s && place.what != "latest"s) fs::create_directory(folder);
  place.make(folder);
  fs::create_directory(folder / "sub");
  for (const auto& to : {folder / "sub", folder.parent_path(), root.path()})
    if (fs::exists(folder / place.name) && fs::is_regular_file(folder / place.name))
      fs::copy_file(folder / place.name, to / place.name, fs::copy_options::overwrite_existing);
  return folder;
}

TEST(HostileNames, AreRefusedWhereverAFileNamesAnother) {
  std::size_t names = 0;
  const auto all = places();
  for (const auto& place : all) {
    const TempFolder root(TempFolder::On::Memory);
    const auto folder = make(place, root);
    place.put(folder, place.name);
    EXPECT_EQ(error_of(place, folder), "") << place.what << " with the right name";
    const auto list = hostile_names(place.name, (root.path() / place.name).string());
    ASSERT_GE(list.size(), 60u);
    names = list.size();
    for (const auto& name : list) {
      // White space at the end of DeepSpeed's latest is none of the name.
      if (place.name == "step3" && name.starts_with(place.name) &&
          name.find_first_not_of(" \r\n", place.name.size()) == std::string::npos)
        continue;
      const TempFolder own(TempFolder::On::Memory);
      const auto copy = make(place, own);
      place.put(copy, name);
      EXPECT_NE(error_of(place, copy), "") << place.what << " names \"" << name.substr(0, 300) << "\"";
    }
  }
  std::cout << names << " names in " << all.size() << " places, all refused\n";
}

// A right name of something that is no file, or leads elsewhere.
TEST(HostileNames, OnlyRegularFilesAreRead) {
  int cases = 0, devices = 0;
  for (const auto& place : places())
    for (const auto& name : place.files)
      for (const char* kind : {"link", "relative link", "link to a link", "dangling link", "link to itself", "FIFO",
                               "socket", "folder", "/dev/zero", "link to a FIFO", "nothing"}) {
        const TempFolder root(TempFolder::On::Memory);
        const auto folder = make(place, root);
        const auto file = folder / name, moved = root.path() / "moved";
        SCOPED_TRACE(place.what + ": "s + name + " is a "s + kind);
        fs::rename(file, moved);
        const std::string what = kind;
        if (what == "link") fs::create_symlink(moved, file);
        if (what == "relative link") fs::create_symlink("../../moved", file);
        if (what == "link to a link") fs::create_symlink(moved, root.path() / "m"), fs::create_symlink("../../m", file);
        if (what == "dangling link") fs::create_symlink(root.path() / "none", file);
        if (what == "link to itself") fs::create_symlink(file, file);
        if (what == "FIFO") {
          ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
        }
        if (what == "link to a FIFO") {
          ASSERT_EQ(::mkfifo((root.path() / "f").c_str(), 0600), 0);
          fs::create_symlink(root.path() / "f", file);
        }
        if (what == "folder") fs::create_directory(file);
        if (what == "socket") {
          const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
          sockaddr_un address{};
          address.sun_family = AF_UNIX;
          ASSERT_LT(file.string().size(), sizeof address.sun_path);
          std::strcpy(address.sun_path, file.c_str());
          ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0) << std::strerror(errno);
          ::close(fd);
        }
        if (what == "/dev/zero") {
          if (::mknod(file.c_str(), S_IFCHR | 0600, makedev(1, 5)) != 0) continue;  // not root
          ++devices;
        }
        EXPECT_NE(error_of(place, folder), "");
        ++cases;
      }
  std::cout << cases << " files that are none" << (devices == 0 ? ", without devices (not root)" : "")
            << ", all refused\n";
}

}  // namespace
}  // namespace zero::test::hostile_names_test
