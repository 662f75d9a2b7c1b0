// SentencePiece's model file, a protocol buffer (sentencepiece_model.proto), read without its library: Debian's
// libsentencepiece exports a copy of protobuf, as libtorch does, and two copies in one process interpose each other; it
// ends the process on damaged models; and it does not tell offsets of the original text.
#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <unordered_set>

#include "apps/data/tokenizers/decoders.h"
#include "apps/data/tokenizers/normalizers.h"
#include "apps/data/tokenizers/readers.h"

namespace data {
namespace {

struct Damaged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A message of protocol buffers: fields with a number and a value.
class Message {
 public:
  explicit Message(std::string_view bytes) : rest_(bytes) {}

  // The next field; false at the end.
  bool next() {
    if (rest_.empty()) return false;
    const auto tag = varint();
    number = tag >> 3;
    integer = 0;
    bytes = {};
    switch (tag & 7) {
      case 0:
        integer = varint();
        break;
      case 1:
        take(8);
        break;
      case 2:
        take(varint());
        break;
      case 5:
        take(4);
        break;
      default:
        throw Damaged("a field of wire type " + std::to_string(tag & 7));
    }
    return true;
  }
  float real() const {
    if (bytes.size() != 4) throw Damaged("a number of " + std::to_string(bytes.size()) + " bytes");
    std::uint32_t bits = 0;
    std::memcpy(&bits, bytes.data(), 4);
    return std::bit_cast<float>(bits);
  }

  std::uint64_t number = 0, integer = 0;
  std::string_view bytes;

 private:
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (rest_.empty()) throw Damaged("the end inside a number");
      const auto byte = static_cast<unsigned char>(rest_[0]);
      rest_.remove_prefix(1);
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    throw Damaged("a number of more than 64 bits");
  }
  void take(std::uint64_t size) {
    if (size > rest_.size())
      throw Damaged("a field of " + std::to_string(size) + " bytes, of which " + std::to_string(rest_.size()) +
                    " are there");
    bytes = rest_.substr(0, size);
    rest_.remove_prefix(size);
  }

  std::string_view rest_;
};

enum PieceType { kNormal = 1, kUnknownPiece = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

struct SentencePieceModel {
  std::vector<std::pair<std::string, std::int64_t>> tokens;
  std::vector<double> scores;
  std::vector<int> types;
  int model_type = 1;  // 1: Unigram, 2: BPE
  bool byte_fallback = false;
  std::int64_t unknown = -1;
  SentencePieceOptions normalizer;
};

void read_piece(std::string_view bytes, SentencePieceModel& model) {
  std::string text;
  float score = 0;
  int type = kNormal;
  for (Message m(bytes); m.next();) {
    if (m.number == 1) text = m.bytes;
    if (m.number == 2) score = m.real();
    if (m.number == 3) type = static_cast<int>(std::min<std::uint64_t>(m.integer, 100));
  }
  if (text.empty() || invalid_utf8(text) < text.size()) throw Damaged("a piece that is empty or not UTF-8");
  if (!(score > -1e30F && score < 1e30F)) throw Damaged("a piece with a score that is no number");
  if (type < kNormal || type > kByte) throw Damaged("a piece of type " + std::to_string(type));
  if (type == kUnknownPiece) {
    if (model.unknown >= 0) throw Damaged("two pieces for what is unknown");
    model.unknown = static_cast<std::int64_t>(model.tokens.size());
  }
  model.tokens.emplace_back(std::move(text), static_cast<std::int64_t>(model.tokens.size()));
  model.scores.push_back(static_cast<double>(score));
  model.types.push_back(type);
}

void read_normalizer(std::string_view bytes, SentencePieceModel& model) {
  for (Message m(bytes); m.next();) {
    if (m.number == 2 && !m.bytes.empty()) {
      try {
        model.normalizer.map = std::make_shared<const Charsmap>(m.bytes);
      } catch (const std::invalid_argument& e) {
        throw Damaged(e.what());
      }
    }
    if (m.number == 3) model.normalizer.dummy_prefix = m.integer != 0;
    if (m.number == 4) model.normalizer.remove_extra_spaces = m.integer != 0;
    if (m.number == 5) model.normalizer.escape_spaces = m.integer != 0;
  }
}

SentencePieceModel parse(std::string_view bytes) {
  SentencePieceModel model;
  for (Message m(bytes); m.next();) {
    if (m.number == 1) read_piece(m.bytes, model);
    if (m.number == 2)
      for (Message trainer(m.bytes); trainer.next();) {
        if (trainer.number == 3) model.model_type = static_cast<int>(std::min<std::uint64_t>(trainer.integer, 100));
        if (trainer.number == 24) model.normalizer.space_is_suffix = trainer.integer != 0;
        if (trainer.number == 35) model.byte_fallback = trainer.integer != 0;
      }
    if (m.number == 3) read_normalizer(m.bytes, model);
  }
  if (model.unknown < 0) throw Damaged("no piece for what is unknown");
  return model;
}

std::unique_ptr<Model> unigram_of(SentencePieceModel& model) {
  UnigramOptions options;
  options.single_precision = true;
  options.byte_fallback = model.byte_fallback;
  options.unknown = static_cast<std::int32_t>(model.unknown);
  for (const auto type : model.types) {
    options.matched.push_back(type == kNormal || type == kUserDefined);
    options.user_defined.push_back(type == kUserDefined);
  }
  return unigram_model(Vocabulary(std::move(model.tokens)), std::move(model.scores), options);
}

// Its library joins the neighbours whose whole has the highest score, whichever parts it has: every way to cut a piece
// in two is a merge.
std::unique_ptr<Model> bpe_of(SentencePieceModel& model) {
  constexpr std::size_t kPieceBytes = 256, kMostMerges = std::size_t{1} << 24;
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < model.tokens.size(); ++i)
    if (model.types[i] == kNormal) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return model.scores[a] > model.scores[b]; });
  std::unordered_set<std::string_view> pieces;
  for (const auto i : order) pieces.insert(model.tokens[i].first);
  BpeOptions options;
  options.unknown = model.tokens[static_cast<std::size_t>(model.unknown)].first;
  options.fuse_unknown = true;
  options.byte_fallback = model.byte_fallback;
  std::vector<std::pair<std::string, std::string>> merges;
  std::uint32_t rank = 0;
  for (std::size_t n = 0; n < order.size(); ++n) {
    if (n > 0 && model.scores[order[n]] != model.scores[order[n - 1]]) ++rank;
    const std::string_view piece = model.tokens[order[n]].first;
    if (piece.size() > kPieceBytes) throw Damaged("a piece of " + std::to_string(piece.size()) + " bytes");
    for (std::size_t cut = 1; cut < piece.size(); ++cut) {
      if (!pieces.contains(piece.substr(0, cut)) || !pieces.contains(piece.substr(cut))) continue;
      merges.emplace_back(piece.substr(0, cut), piece.substr(cut));
      options.ranks.push_back(rank);
    }
    if (merges.size() > kMostMerges) throw Damaged("more than " + std::to_string(kMostMerges) + " merges");
  }
  return bpe_model(Vocabulary(std::move(model.tokens)), merges, options);
}

bool has_token(const PipelineParts& parts, const std::string& content) {
  return std::any_of(parts.added.begin(), parts.added.end(),
                     [&](const auto& token) { return token.content == content; });
}

void add_special(PipelineParts& parts, std::initializer_list<const char*> names) {
  for (const auto* name : names)
    if (const auto id = parts.model->vocabulary().id(name); id && !has_token(parts, name))
      parts.added.push_back({name, *id, true});
}

// T5's: an end behind every text, and sentinels with the largest ids, the first with the last one.
void make_t5(const TokenizerConfig& config, std::int32_t end, PipelineParts& parts) {
  const auto& all = parts.model->vocabulary();
  add_special(parts, {"<pad>", "</s>", "<unk>"});
  const auto count = config.any_added ? 0 : config.extra_ids.value_or(100);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto name = "<extra_id_" + std::to_string(i) + ">";
    if (has_token(parts, name)) continue;
    const auto own = all.id(name);
    const auto id = own ? *own : static_cast<std::int32_t>(all.size() + count - 1 - i);
    parts.added.push_back({name, id, true, false, true, true});
  }
  parts.single = {{.text = 0}, {.ids = {end}}};
  parts.pair = {{.text = 0}, {.ids = {end}}, {.text = 1}, {.ids = {end}}};
}

// Llama's: a beginning before every text.
void make_llama(const TokenizerConfig& config, std::int32_t begin, std::int32_t end, PipelineParts& parts) {
  add_special(parts, {"<unk>", "<s>", "</s>"});
  parts.single.clear();
  parts.pair.clear();
  const auto add = [&](std::vector<TemplateItem>& items, int text, std::uint8_t type) {
    if (config.add_begin.value_or(true)) items.push_back({.ids = {begin}, .type = type});
    items.push_back({.text = text, .type = type});
    if (config.add_end.value_or(false)) items.push_back({.ids = {end}, .type = type});
  };
  add(parts.single, 0, 0);
  add(parts.pair, 0, 0);
  add(parts.pair, 1, 1);
  parts.special.begin = begin;
}

}  // namespace

PipelineParts read_sentence_piece(const std::string& file, std::string_view bytes, const TokenizerConfig& config) {
  const auto refuse = [&](const std::string& got, const std::string& expected) {
    throw std::runtime_error("[tokenizer " + file + "] got " + got + ", expected " + expected);
  };
  PipelineParts parts;
  bool bpe = false;
  try {
    auto model = parse(bytes);
    bpe = model.model_type == 2;
    if (!bpe && model.model_type != 1)
      refuse("a SentencePiece model of type " + std::to_string(model.model_type), "1 (Unigram) or 2 (BPE)");
    const auto* known = bpe ? "LlamaTokenizer" : "T5Tokenizer";
    if (!config.tokenizer_class.empty() && config.tokenizer_class != known)
      refuse("the model of a " + config.tokenizer_class.substr(0, 80),
             std::string("that of a ") + known + ". Hint: a folder with its tokenizer.json");
    if (std::find(model.types.begin(), model.types.end(), kUserDefined) != model.types.end() &&
        (bpe || model.normalizer.map))
      refuse("user-defined pieces with BPE or a normalisation",
             "no such pieces. Hint: a folder with its tokenizer.json");
    parts.normalizers.push_back(sentence_piece(model.normalizer));
    parts.decoders.push_back(decode_metaspace("\xe2\x96\x81", model.normalizer.dummy_prefix));
    if (model.byte_fallback) parts.decoders.push_back(decode_byte_fallback());
    parts.model = bpe ? bpe_of(model) : unigram_of(model);
  } catch (const Damaged& e) {
    refuse(e.what(), "a SentencePiece model");
  } catch (const std::invalid_argument& e) {
    refuse(e.what(), "a SentencePiece model");
  }
  parts.kind = bpe ? "BPE" : "Unigram";
  parts.decodes = true;
  parts.added = config.added;
  const auto& all = parts.model->vocabulary();
  const auto end = all.id(config.end.value_or("</s>")), begin = all.id(config.begin.value_or("<s>"));
  if (!end || (bpe && !begin)) refuse("a model without </s> or <s>", bpe ? "both, as Llama has" : "</s>, as T5 has");
  parts.special.end = end;
  if (bpe)
    make_llama(config, *begin, *end, parts);
  else
    make_t5(config, *end, parts);
  resolve_special(file, config, true, parts);
  return parts;
}

}  // namespace data
