// Checkpoints at the limits of processes and numbers: few open files, odd buffers, counters of a hostile manifest.
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>

#include "formats/blocks.h"
#include "formats/manifest.h"
#include "formats/range_reader.h"
#include "formats/rank_file.h"
#include "soundness/small_programs.h"
#include "support/file_text.h"
#include "support/folder.h"

namespace zero::test::checkpoint_limits_test {
namespace {

namespace fs = std::filesystem;

class FewFiles {
 public:
  explicit FewFiles(rlim_t more) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const auto open =
        static_cast<rlim_t>(std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator()));
    const rlimit now{open + more, before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &now);
  }
  ~FewFiles() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

// Parts of one tensor are in the files of many ranks. Read in the order of a load at stage 0: all files per tensor.
TEST(CheckpointLimits, MoreRanksThanOpenFiles) {
  constexpr int kRanks = 300;
  const TempFolder where;
  auto folder = formats::Folder::make(formats::system_files(), where.text());
  formats::Manifest manifest;
  std::vector<std::pair<std::string, std::string>> rows;
  std::vector<float> values(2 * kRanks);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 0.5f;
  std::vector<formats::Tensor> tensors(3, {"master", "", "F32", {kRanks * 2}, true, {}});
  for (int r = 0; r < kRanks; ++r) {
    std::vector<formats::Source> sources;
    for (int t = 0; t < 3; ++t) {
      formats::Source source{"master", "w" + std::to_string(t), "F32", {kRanks * 2}, true, r * 2, 2, {}, true};
      source.read = [&values, r](std::int64_t at, std::int64_t) {
        return std::shared_ptr<const void>(std::shared_ptr<void>(), values.data() + 2 * r + at);
      };
      sources.push_back(std::move(source));
    }
    auto file = formats::write_rank_file(folder, formats::rank_file_name(r), sources);
    for (std::size_t t = 0; t < 3; ++t) {
      tensors[t].name = file.tensors[t].name;
      for (auto& part : file.tensors[t].parts) {
        part.file = static_cast<std::uint32_t>(r);
        tensors[t].parts.push_back(part);
      }
    }
    manifest.files.push_back(file.file);
    rows.emplace_back(file.file.name, file.rows);
  }
  manifest.files.push_back(formats::write_blocks(folder, rows));
  manifest.blocks = manifest.files.back().name;
  const auto read_all = [&](formats::RangeReader& reader) {
    for (const auto& tensor : tensors) {
      std::vector<float> got(values.size());
      reader.add(0, tensor, {{0, 0, kRanks * 2}});
      reader.read([&](std::size_t, const formats::Run& run, const char* bytes) {
        std::memcpy(&got[static_cast<std::size_t>(run.wanted)], bytes, static_cast<std::size_t>(run.numel) * 4);
      });
      ASSERT_EQ(got, values);
    }
  };
  {
    const FewFiles few(80);
    formats::RangeReader reader(folder, manifest);
    EXPECT_EQ(message_of([&] {
                read_all(reader);
                read_all(reader);
                reader.finish();
              }),
              "");
  }
  // A file that is replaced while it is closed is detected by the next read or at the end.
  for (const int replaced : {0, kRanks - 1}) {
    formats::RangeReader reader(folder, manifest);
    read_all(reader);
    const auto path = where.text() + "/" + formats::rank_file_name(replaced);
    fs::copy_file(path, path + ".copy");
    fs::rename(path + ".copy", path);
    const auto error = message_of([&] {
      read_all(reader);
      reader.finish();
    });
    EXPECT_TRUE(contains(error, formats::rank_file_name(replaced))) << error;
    EXPECT_TRUE(contains(error, "replaced")) << error;
  }
}

// Assigned after construction, in a different order.
TEST(CheckpointLimits, BuffersThatAreNotContiguous) {
  for (const int world : {1, 2}) {
    const TempFolder folder;
    const auto errors = errors_of_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      auto model = small_model();
      model->register_buffer("table", torch::zeros({4, 6}));
      model->register_buffer("row", torch::zeros({5}));
      Engine engine(model, small_options(1), comm);
      const auto table = torch::arange(24, torch::kFloat).view({6, 4}).t(), row = torch::full({1}, 7.0f).expand({5});
      for (auto& item : model->named_buffers()) item.value().set_data(item.key() == "table" ? table : row);
      engine.save_checkpoint(folder.text(), "t");
      const auto fill_with = [&](const at::Tensor& t, const at::Tensor& r) {
        for (auto& item : model->named_buffers()) item.value().set_data(item.key() == "table" ? t : r);
      };
      const auto check = [&] {
        EXPECT_TRUE(torch::equal(*model->named_buffers().find("table"), table));
        EXPECT_TRUE(torch::equal(*model->named_buffers().find("row"), torch::full({5}, 7.0f)));
      };
      fill_with(torch::zeros({6, 4}).t(), torch::zeros({1}).expand({5}));  // not contiguous when loaded, either
      engine.load_checkpoint(folder.text(), "t");
      check();
      fill_with(torch::zeros({4, 6}), torch::zeros({5}));
      engine.load_checkpoint(folder.text(), "t");
      check();
    });
    for (const auto& error : errors) EXPECT_EQ(error, "");
  }
}

TEST(CheckpointLimits, CountersOfAManifest) {
  const TempFolder folder;
  auto model = small_model();
  {
    Engine engine(model, small_options(1), Communicator::local());
    engine.backward(model->forward(small_input(0)).pow(2).mean());
    engine.step();
    engine.save_checkpoint(folder.text(), "t");
  }
  const auto text = file_text(folder.text() + "/t/manifest.json");
  EXPECT_EQ(message_of([&] { formats::parse_manifest(text, "m"); }), "");
  for (const char* field :
       {"global_steps", "applied_steps", "skipped_steps", "global_samples", "seq", "hysteresis", "good", "floor"}) {
    const auto at = text.find("\"" + std::string(field) + "\": ");
    ASSERT_NE(at, std::string::npos) << field;
    const auto begin = text.find(": ", at) + 2, end = text.find_first_of(",\n", begin);
    for (const char* count : {"9223372036854775807", "9223372036854775806", "4611686018427387904"}) {
      auto hostile = text;
      hostile.replace(begin, end - begin, count);
      const auto error = message_of([&] { formats::parse_manifest(hostile, "m"); });
      EXPECT_TRUE(contains(error, field)) << field << " " << count << ": " << error;
    }
  }
}

}  // namespace
}  // namespace zero::test::checkpoint_limits_test
