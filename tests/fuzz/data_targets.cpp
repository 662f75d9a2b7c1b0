// Targets of the readers of training data. See targets.h.
#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

#include "data/records.h"
#include "data/tokenizers/readers.h"
#include "fuzz/accepts.h"
#include "fuzz/targets.h"

namespace zero::test {
namespace {

// As accepts(): the readers of data/ know none of libzero's errors.
template <class Run>
bool takes(const Run& run) {
  try {
    run();
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

// A path under which a file has these bytes until the next call.
std::string path_of(std::string_view bytes) {
  static const int fd = ::memfd_create("records", MFD_CLOEXEC);
  require(fd >= 0 && ::ftruncate(fd, 0) == 0 &&
              ::pwrite(fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
          "no file in memory");
  return "/proc/self/fd/" + std::to_string(fd);
}

// The first byte chooses the format.
void records(std::string_view bytes) {
  if (bytes.empty()) return;
  constexpr data::RecordFormat kFormats[] = {data::RecordFormat::Jsonl, data::RecordFormat::Csv,
                                             data::RecordFormat::Squad, data::RecordFormat::Lines};
  const auto format = kFormats[static_cast<unsigned char>(bytes[0]) % 4];
  (void)takes([&] {
    const data::Records all({path_of(bytes.substr(1))}, {format, {}});
    for (std::int64_t i = 0; i < all.size(); ++i) {
      const auto record = all.at(i);
      const auto* context = record.find("context");
      for (const auto& answer : record.answers)
        require(answer.begin < 0 || (context != nullptr && context->compare(static_cast<std::size_t>(answer.begin),
                                                                            answer.text.size(), answer.text) == 0),
                "an answer is not where its record says");
    }
  });
}

// What is read encodes any text into ids that it can decode.
void use(data::PipelineParts parts) {
  std::unique_ptr<data::Tokenizer> tokenizer;
  try {
    tokenizer = data::make_tokenizer(std::move(parts));
  } catch (const std::invalid_argument&) {
    return;
  }
  for (const auto* text : {"", " a  ab [MASK]<s>", "\u00c9e\u0301 \u4e2d\u6587\n\U0001f469\u200d\U0001f467 123"}) {
    (void)takes([&] {
      const auto encoding = tokenizer->encode_with_offsets(text);
      for (const auto id : encoding.ids)
        require(id >= 0 && id < tokenizer->vocabulary(), "an id beyond the vocabulary");
      for (const auto& range : encoding.offsets)
        require(range.begin <= range.end && range.end <= std::string_view(text).size(), "an offset beyond the text");
      (void)tokenizer->decode(encoding.ids);
      (void)tokenizer->encode_pair(text, text);
    });
  }
}

void tokenizer(std::string_view bytes) {
  (void)takes([&] { use(data::read_tokenizer_json("f", bytes)); });
}

// Three files with bytes of 0 between them: the configuration, and a vocabulary with its merges or alone.
void vocabulary(std::string_view bytes) {
  const auto first = bytes.find('\0');
  if (first == std::string_view::npos) return;
  const auto second = bytes.find('\0', first + 1);
  (void)takes([&] {
    const auto config = data::read_tokenizer_config("f", bytes.substr(0, first));
    if (second == std::string_view::npos)
      use(data::read_vocabulary_text("f", bytes.substr(first + 1), config));
    else
      use(data::read_gpt2("f", bytes.substr(first + 1, second - first - 1), bytes.substr(second + 1), config));
  });
}

void spiece(std::string_view bytes) {
  data::TokenizerConfig config;
  config.extra_ids = 2;
  (void)takes([&] { use(data::read_sentence_piece("f", bytes, config)); });
}

constexpr FuzzTarget kTargets[] = {
    {"records", records}, {"spiece", spiece}, {"tokenizer", tokenizer}, {"vocabulary", vocabulary}};

}  // namespace

std::span<const FuzzTarget> data_fuzz_targets() { return kTargets; }

}  // namespace zero::test
