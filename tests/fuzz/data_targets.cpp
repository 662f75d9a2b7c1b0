// Targets of the readers of apps/data and models/: training data, tokenizers, a model's config.json. See targets.h.
#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <variant>

#include "apps/data/records.h"
#include "apps/data/tokenizers/readers.h"
#include "fuzz/accepts.h"
#include "fuzz/targets.h"
#include "models/hf_config.h"

namespace zero::test {
namespace {

// As accepts(): the readers of apps/data know none of libzero's errors.
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

auto values_of(const models::GptConfig& c) {
  return std::tie(c.layers, c.hidden, c.heads, c.sequence, c.vocabulary, c.dropout, c.tied_output, c.deviation);
}

bool same(const models::AnyConfig& read, const models::AnyConfig& again) {
  const auto equals = [&]<class Config>(Config config) {
    const auto* other = std::get_if<Config>(&again);
    if (other == nullptr) return false;
    if constexpr (std::is_same_v<Config, models::GptConfig>) {
      return values_of(config) == values_of(*other);
    } else {
      // Is written also where a file leaves it to the number of heads.
      if constexpr (std::is_same_v<Config, models::LlamaConfig>) config.head_width = config.width();
      return config == *other;
    }
  };
  return std::visit(equals, read);
}

void hf_config(std::string_view bytes) {
  models::HfConfig read;
  try {
    read = models::parse_hf_config(std::string(bytes), "f");
  } catch (const std::invalid_argument&) {
    return;
  }
  const auto text = models::hf_config_text(read);
  const auto again = models::parse_hf_config(text, "f");
  require(same(read.config, again.config), "a configuration does not come back");
  require(again.unknown.empty(), "a configuration is written with a key that is not read");
  require(read.architecture.empty() || read.architecture == again.architecture,
          "the name of a class does not come back");
  require(read.bos_token == again.bos_token && read.eos_tokens == again.eos_tokens && read.pad_token == again.pad_token,
          "tokens with a role do not come back");
  require(read.labels.empty() || read.labels == again.labels, "names of classes do not come back");
  require(models::hf_config_text(again) == text, "a configuration has two texts");
}

constexpr FuzzTarget kTargets[] = {{"hf_config", hf_config},
                                   {"records", records},
                                   {"spiece", spiece},
                                   {"tokenizer", tokenizer},
                                   {"vocabulary", vocabulary}};

}  // namespace

std::span<const FuzzTarget> data_fuzz_targets() { return kTargets; }

}  // namespace zero::test
