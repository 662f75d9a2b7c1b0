// A kept snapshot in memory: what is written is read, and what is torn, damaged or of another shape is none.
#include "formats/kept_slot.h"

#include <unistd.h>

#include "base/fd.h"
#include "base/kept_memory.h"
#include "base/memory_file.h"
#include "unit/formats/checkpoint_faults.h"
#include "unit/formats/checkpoint_samples.h"

namespace zero::test::kept_slot_test {
namespace {

using formats::KeptHeader;
using formats::KeptSlot;

const std::string kKey(32, 'a');

// Memory as the launcher makes it, but of a size that a test may change.
struct Memory {
  base::Descriptor fd{base::open_memory_file("test", 0)};
  std::string bytes(std::uint64_t begin, std::size_t count) const {
    std::string text(count, '\0');
    EXPECT_EQ(::pread(fd.get(), text.data(), count, static_cast<off_t>(begin)), static_cast<ssize_t>(count));
    return text;
  }
  void write(const std::string& text, std::uint64_t begin) const {
    EXPECT_EQ(::pwrite(fd.get(), text.data(), text.size(), static_cast<off_t>(begin)),
              static_cast<ssize_t>(text.size()));
  }
  std::uint64_t size() const { return static_cast<std::uint64_t>(::lseek(fd.get(), 0, SEEK_END)); }
};

// As one rank of two keeps it: elements 100 to 200 of 300.
std::vector<formats::Source> part_of(const Sample& sample) {
  auto sources = sources_of(sample);
  sources[0].start = 100;
  sources[0].numel = 100;
  sources[0].read = [&sample](std::int64_t at, std::int64_t) {
    return std::shared_ptr<const void>(std::shared_ptr<const void>(), sample.weights.data() + 100 + at);
  };
  return sources;
}

KeptHeader fill(KeptSlot& slot, int value, std::int64_t attempt = 0) {
  const Sample sample(value);
  slot.begin();
  const auto folder = slot.folder();
  const auto file = formats::write_rank_file(folder, formats::rank_file_name(0), part_of(sample));
  const auto blocks = formats::write_blocks(folder, {{file.file.name, file.rows}});
  auto manifest = sample_manifest(value, file, blocks);
  manifest.tag = "kept";
  manifest.id = kKey;
  const auto text = formats::manifest_text(manifest);
  folder.write_file(formats::kManifestName, text);
  const KeptHeader header{attempt, value, kKey, formats::hash_of(text)};
  slot.publish(header);
  return header;
}

// The step of what is whole; -1: the slot is empty; -2: it was found damaged.
int look(KeptSlot& slot) {
  const auto header = slot.read();
  if (!header) return -1;
  try {
    const auto folder = slot.folder();
    const auto manifest = formats::read_manifest(folder, header->manifest_hash, formats::Extent::Rank);
    const int value = static_cast<int>(manifest.global_steps);
    const Sample sample(value);
    std::string got(400, '\0'), mask(70, '\0'), own(33, '\0');
    formats::RangeReader reader(folder, manifest);
    reader.add(0, manifest.tensors.at(0), {{0, 100, 100}});
    reader.add(1, manifest.tensors.at(1), {{0, 0, 70}});
    reader.add(2, manifest.ranks.at(0).at(0), {{0, 0, 33}});
    reader.read([&](std::size_t id, const formats::Run& run, const char* bytes) {
      auto& to = id == 0 ? got : id == 1 ? mask : own;
      const auto width = static_cast<std::size_t>(id == 0 ? 4 : 1);
      std::memcpy(to.data() + static_cast<std::size_t>(run.wanted) * width, bytes,
                  static_cast<std::size_t>(run.numel) * width);
    });
    reader.finish();
    EXPECT_EQ(std::memcmp(got.data(), sample.weights.data() + 100, 400), 0);
    EXPECT_EQ(std::memcmp(mask.data(), sample.mask.data(), 70), 0);
    EXPECT_EQ(std::memcmp(own.data(), sample.own.data(), 33), 0);
    EXPECT_EQ(header->step, value);
    return value;
  } catch (const IoError& e) {
    EXPECT_EQ(e.code(), ExitCode::kCheckpoint) << e.what();
    return -2;
  }
}

TEST(KeptSlot, TwoSlotsHoldWhatWasWrittenToThem) {
  const Memory memory;
  KeptSlot first(formats::system_files(), memory.fd.get(), 0), second(formats::system_files(), memory.fd.get(), 1);
  EXPECT_EQ(look(first), -1);
  EXPECT_EQ(look(second), -1);
  const auto header = fill(first, 3, 2);
  fill(second, 4);
  fill(second, 5);  // over the one before
  // Another process reads it.
  KeptSlot reader(formats::system_files(), memory.fd.get(), 0), other(formats::system_files(), memory.fd.get(), 1);
  EXPECT_EQ(reader.read(), header);
  EXPECT_EQ(look(reader), 3);
  EXPECT_EQ(look(other), 5);
}

TEST(KeptSlot, EveryDamagedByteIsFound) {
  const Memory memory;
  KeptSlot slot(formats::system_files(), memory.fd.get(), 0);
  fill(slot, 3);
  const auto all = memory.bytes(0, memory.size());
  const auto text = all.find('\0');
  int empty = 0, damaged = 0, unseen = 0;
  // All of the header, and every third byte of the files.
  for (std::size_t i = 0; i < all.size(); i += i < text ? 1 : 3) {
    memory.write(std::string(1, static_cast<char>(all[i] ^ (1 << (i % 8)))), i);
    KeptSlot reader(formats::system_files(), memory.fd.get(), 0);
    const int found = look(reader);
    empty += found == -1;
    damaged += found == -2;
    if (i < text) EXPECT_EQ(found, -1) << "byte " << i;
    unseen += found == 3 && all[i] != '\0';  // zeros are between the files
    memory.write(std::string(1, all[i]), i);
  }
  EXPECT_EQ(look(slot), 3);
  EXPECT_GE(empty, static_cast<int>(text));
  EXPECT_GE(damaged, (400 + 70 + 33) / 3);
  EXPECT_LE(unseen, 40) << "more than words in the header of the hashes' file that no reader needs";
}

TEST(KeptSlot, ATruncatedMemoryIsNotRead) {
  for (const std::uint64_t cut : {1, 2, 5, 20, 100, 400, 1000, 4096, 5000}) {
    const Memory memory;
    KeptSlot slot(formats::system_files(), memory.fd.get(), 0);
    fill(slot, 3);
    ASSERT_EQ(::ftruncate(memory.fd.get(), static_cast<off_t>(memory.size() - std::min(cut, memory.size()))), 0);
    KeptSlot reader(formats::system_files(), memory.fd.get(), 0);
    EXPECT_LT(look(reader), 0) << cut;
  }
}

// Dies at every call of a fill, as by SIGKILL: the slot is none, the other one whole.
TEST(KeptSlot, ATornFillLeavesTheOtherSlot) {
  bool through = false;
  for (int k = 1; !through; ++k) {
    const Memory memory;
    {
      KeptSlot before(formats::system_files(), memory.fd.get(), 0), old(formats::system_files(), memory.fd.get(), 1);
      fill(before, 3);
      fill(old, 2);
    }
    FaultyFiles files(FaultyFiles::Fault::Error, k, ENOSPC);
    KeptSlot slot(files, memory.fd.get(), 1);
    int code = code_of([&] { fill(slot, 4); });
    through = !files.struck();
    EXPECT_EQ(code == 0, through);
    KeptSlot first(formats::system_files(), memory.fd.get(), 0), second(formats::system_files(), memory.fd.get(), 1);
    EXPECT_EQ(look(first), 3);
    // The call that says that it is being filled may be the one that fails.
    EXPECT_EQ(look(second), through ? 4 : k == 1 ? 2 : -1) << "at call " << k;
    ASSERT_LT(k, 100);
  }
}

// Headers with a right hash and wrong words.
TEST(KeptSlot, HostileHeadersAreNone) {
  const auto text_of = [](const std::string& files) {
    return "zero.kept/1\nattempt 0\nstep 3\nkey " + kKey + "\nmanifest " + kKey + "\nfiles " + files;
  };
  const auto taken = [](const std::string& text) {
    const Memory memory;
    memory.write(std::string(4096, '\0'), 0);
    memory.write(text + formats::hash_of(text) + "\n", 0);
    return KeptSlot(formats::system_files(), memory.fd.get(), 0).read().has_value();
  };
  EXPECT_TRUE(taken(text_of("1\na 4096 10\n")));
  EXPECT_TRUE(taken(text_of("2\na 4096 10\nb 8192 10\n")));
  for (const char* const files :
       {"1\n", "2\na 4096 10\n", "1\n../a 4096 10\n", "1\na 0 10\n", "1\na 4097 10\n", "1\na -4096 10\n",
        "2\na 4096 5000\nb 8192 10\n", "1\na 4096 1099511627776\n", "1\na 9223372036854771712 10\n",
        "1\na 4096 18446744073709551615\n", "18446744073709551615\na 4096 10\n", "1\na 4096 x\n"})
    EXPECT_FALSE(taken(text_of(files))) << files;
  auto text = text_of("1\na 4096 10\n");
  EXPECT_FALSE(taken(text.replace(0, 11, "zero.kept/2")));
  text = text_of("1\na 4096 10\n");
  EXPECT_FALSE(taken(text.replace(text.find("step 3"), 6, "step -")));
}

TEST(KeptSlot, PartsOfOneRankNeedNotBeAll) {
  const Memory memory;
  KeptSlot slot(formats::system_files(), memory.fd.get(), 0);
  const auto header = fill(slot, 3);
  const auto folder = slot.folder();
  EXPECT_EQ(code_of([&] { formats::read_manifest(folder, header.manifest_hash); }), kDamaged);
  const auto manifest = formats::read_manifest(folder, header.manifest_hash, formats::Extent::Rank);
  formats::RangeReader reader(folder, manifest);
  std::string text;
  for (const formats::Run& run : {formats::Run{0, 99, 2}, {0, 199, 2}, {0, 0, 300}, {0, 250, 1}})
    EXPECT_EQ(code_of([&] { reader.add(0, manifest.tensors.at(0), {run}); }, &text), kDamaged);
  EXPECT_NE(text.find("lacks 1 elements of master of layer.weight"), std::string::npos) << text;
}

TEST(KeptSlot, TheLaunchersMemoryHasRoomForBoth) {
  const base::Descriptor memory(base::make_kept_memory());
  ASSERT_GE(memory.get(), 0);
  for (const int number : {0, 1}) {
    KeptSlot slot(formats::system_files(), memory.get(), number);
    fill(slot, 3 + number);
    EXPECT_EQ(look(slot), 3 + number);
  }
  EXPECT_NE(::ftruncate(memory.get(), 0), 0) << "a rank can change its size";
}

}  // namespace
}  // namespace zero::test::kept_slot_test
