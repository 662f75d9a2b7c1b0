// Event files read back by an independent parser, the checksum against published values, CSV files, and Monitor.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include <zero/errors.h>
#include <zero/monitor.h>

#include "observe/csv_file.h"
#include "observe/event_file.h"
#include "support/file_text.h"
#include "support/folder.h"

namespace zero::report::monitor_test {
namespace {

using zero::test::file_text;

namespace fs = std::filesystem;

// --- a reader that shares nothing with the writer: bit by bit checksums, any order and kind of fields ---

std::uint32_t slow_crc(const std::string& bytes) {
  std::uint32_t crc = 0xffffffffu;
  for (const unsigned char c : bytes) {
    crc ^= c;
    for (int i = 0; i < 8; ++i) crc = (crc & 1) != 0 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
  }
  return crc ^ 0xffffffffu;
}

std::uint32_t masked(std::uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }

template <class T>
T number_at(const std::string& bytes, std::size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

struct Field {
  std::uint64_t number = 0, value = 0;  // value: varint or fixed bits
  std::string bytes;
};

std::vector<Field> fields_of(const std::string& message) {
  std::size_t at = 0;
  const auto varint = [&] {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(message.at(at++));
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) return value;
    }
  };
  std::vector<Field> fields;
  while (at < message.size()) {
    const std::uint64_t key = varint();
    Field field{key >> 3, 0, {}};
    switch (key & 7) {
      case 0:
        field.value = varint();
        break;
      case 1:
        field.value = number_at<std::uint64_t>(message, at), at += 8;
        break;
      case 5:
        field.value = number_at<std::uint32_t>(message, at), at += 4;
        break;
      case 2: {
        const auto size = varint();
        field.bytes = message.substr(at, size);
        EXPECT_EQ(field.bytes.size(), size);
        at += size;
        break;
      }
      default:
        throw std::runtime_error("wire type");
    }
    fields.push_back(field);
  }
  EXPECT_EQ(at, message.size());
  return fields;
}

struct Event {
  double wall_time = 0;
  std::int64_t step = 0;
  std::string version;
  std::vector<std::pair<std::string, float>> values;
};

std::vector<Event> read_events(const std::string& file) {
  std::vector<Event> events;
  for (std::size_t at = 0; at < file.size();) {
    const auto size = number_at<std::uint64_t>(file, at);
    EXPECT_EQ(number_at<std::uint32_t>(file, at + 8), masked(slow_crc(file.substr(at, 8))));
    const std::string payload = file.substr(at + 12, size);
    EXPECT_EQ(number_at<std::uint32_t>(file, at + 12 + size), masked(slow_crc(payload)));
    at += 16 + size;
    Event event;
    for (const Field& field : fields_of(payload)) {
      if (field.number == 1) event.wall_time = std::bit_cast<double>(field.value);
      if (field.number == 2) event.step = static_cast<std::int64_t>(field.value);
      if (field.number == 3) event.version = field.bytes;
      if (field.number != 5) continue;
      for (const Field& value : fields_of(field.bytes)) {
        EXPECT_EQ(value.number, 1u);
        std::pair<std::string, float> read;
        for (const Field& part : fields_of(value.bytes)) {
          if (part.number == 1) read.first = part.bytes;
          if (part.number == 2) read.second = std::bit_cast<float>(static_cast<std::uint32_t>(part.value));
        }
        event.values.push_back(read);
      }
    }
    events.push_back(event);
  }
  return events;
}

TEST(EventFile, ChecksumIsTheOneOfTheStandard) {
  // RFC 3720, B.4, and the usual check value.
  EXPECT_EQ(observe::crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(observe::crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(observe::crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(observe::crc32c(""), 0u);
}

TEST(EventFile, ReadsBackAsItWasWritten) {
  const test::TempFolder folder;
  const std::string long_tag(300, 'x');  // a length of two bytes
  fs::path path;
  {
    observe::EventFile file(folder.path() / "a" / "b");
    path = file.path();
    file.write(24, {{"Train/Samples/train_loss", 2.5}, {"Train/Samples/lr", 1e-3}});
    file.write(std::int64_t{1} << 40, {{long_tag, -0.0}, {"\u00e9", std::numeric_limits<double>::infinity()}});
    file.write(7, {});
    file.write(0, {{"zero", std::nan("")}});
  }
  EXPECT_EQ(path.parent_path(), folder.path() / "a" / "b");
  EXPECT_EQ(path.filename().string().find("events.out.tfevents."), 0u);
  const auto events = read_events(file_text(path));
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_NEAR(events[0].wall_time, static_cast<double>(std::time(nullptr)), 60);
  EXPECT_EQ(events[1].step, 24);
  ASSERT_EQ(events[1].values.size(), 2u);
  EXPECT_EQ(events[1].values[0], std::make_pair(std::string("Train/Samples/train_loss"), 2.5f));
  EXPECT_EQ(events[1].values[1], std::make_pair(std::string("Train/Samples/lr"), 1e-3f));
  EXPECT_EQ(events[2].step, std::int64_t{1} << 40);
  EXPECT_EQ(events[2].values[0].first, long_tag);
  EXPECT_TRUE(std::signbit(events[2].values[0].second));
  EXPECT_TRUE(std::isinf(events[2].values[1].second));
  EXPECT_EQ(events[3].step, 0);
  EXPECT_TRUE(std::isnan(events[3].values[0].second));
}

TEST(EventFile, TwoOfOneSecondHaveNamesOfTheirOwn) {
  const test::TempFolder folder;
  const observe::EventFile a(folder.path()), b(folder.path());
  EXPECT_NE(a.path(), b.path());
}

TEST(EventFile, AFolderThatCannotBeMadeIsAnIoError) {
  const test::TempFolder folder;
  std::ofstream(folder.path() / "file") << "x";
  EXPECT_THROW(observe::EventFile(folder.path() / "file" / "below"), IoError);
}

TEST(CsvFiles, OneFileATagThatAResumedRunContinues) {
  const test::TempFolder folder;
  EXPECT_EQ(observe::CsvFiles::file_name("Train/Samples/lr"), "Train_Samples_lr.csv");
  {
    observe::CsvFiles files(folder.path() / "job");
    files.write("Train/Samples/lr", 8, 0.001);
    files.write("Train/Samples/train_loss", 8, 5.5);
    files.write("Train/Samples/lr", 16, 1.0 / 3);
  }
  {
    observe::CsvFiles files(folder.path() / "job");
    files.write("Train/Samples/lr", 24, std::nan(""));
  }
  EXPECT_EQ(file_text(folder.path() / "job" / "Train_Samples_lr.csv"), "step,lr\n8,0.001\n16,0.333333333\n24,nan\n");
  EXPECT_EQ(file_text(folder.path() / "job" / "Train_Samples_train_loss.csv"), "step,train_loss\n8,5.5\n");
  std::ofstream(folder.path() / "file") << "x";
  EXPECT_THROW(observe::CsvFiles(folder.path() / "file" / "job"), IoError);
  fs::create_directories(folder.path() / "taken.csv");
  EXPECT_THROW(observe::CsvFiles(folder.path()).write("taken", 1, 1), IoError);
}

TEST(Monitor, WritesWhatTheConfigurationAsksForOnRankZero) {
  const test::TempFolder folder;
  const std::string path = folder.path().string();
  const auto options = Options::from_json(
      R"({"tensorboard": {"enabled": true, "output_path": ")" + path +
      R"(/tb", "job_name": "one"}, "csv_monitor": {"enabled": true, "output_path": ")" + path + R"(/csv"}})");
  Monitor other(options, 1);
  EXPECT_FALSE(other.active());
  other.write({{monitor_tag::kLr, 1}}, 1);
  EXPECT_FALSE(fs::exists(folder.path() / "tb"));
  Monitor monitor(options, 0);
  EXPECT_TRUE(monitor.active());
  monitor.write({{monitor_tag::kTrainLoss, 3.25}, {monitor_tag::kLossScale, 65536}}, 96);
  EXPECT_EQ(file_text(folder.path() / "csv/DeepSpeedJobName/Train_Samples_loss_scale.csv"),
            "step,loss_scale\n96,65536\n");
  const auto events = read_events(file_text(fs::directory_iterator(folder.path() / "tb/one")->path()));
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].step, 96);
  EXPECT_EQ(events[1].values[0], std::make_pair(std::string("Train/Samples/train_loss"), 3.25f));
  EXPECT_FALSE(Monitor(Options(), 0).active());
}

}  // namespace
}  // namespace zero::report::monitor_test
