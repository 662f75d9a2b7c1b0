// Vocabularies in files of their own: GPT-2's vocab.json with merges.txt, BERT's vocab.txt.
#include <algorithm>
#include <stdexcept>

#include "apps/data/tokenizers/decoders.h"
#include "apps/data/tokenizers/normalizers.h"
#include "apps/data/tokenizers/pre_tokenizers.h"
#include "apps/data/tokenizers/readers.h"

namespace data {
namespace {

[[noreturn]] void refuse(const std::string& file, const std::string& got, const std::string& expected) {
  throw std::runtime_error("[tokenizer " + file + "] got " + got + ", expected " + expected);
}

void check_utf8(const std::string& file, std::string_view text) {
  if (const auto at = invalid_utf8(text); at < text.size())
    refuse(file + ":" + std::to_string(line_of(text, at)), "bytes that are not UTF-8", "UTF-8");
}

// Calls take(line, number) for every line.
template <class Take>
void each_line(std::string_view text, const Take& take) {
  std::int64_t number = 1;
  for (std::size_t at = 0; at < text.size(); ++number) {
    const auto end = std::min(text.find('\n', at), text.size());
    auto line = text.substr(at, end - at);
    if (line.ends_with('\r')) line.remove_suffix(1);
    take(line, number);
    at = end + 1;
  }
}

std::vector<std::pair<std::string, std::string>> merges_of(const std::string& file, std::string_view text) {
  check_utf8(file, text);
  std::vector<std::pair<std::string, std::string>> merges;
  each_line(text, [&](std::string_view line, std::int64_t number) {
    if (line.starts_with("#version") || line.empty()) return;
    const auto space = line.find(' ');
    if (space == 0 || space == std::string_view::npos || space + 1 == line.size() ||
        line.find(' ', space + 1) != std::string_view::npos)
      refuse(file + ":" + std::to_string(number), "a line of another form", "two tokens with a space between them");
    merges.emplace_back(line.substr(0, space), line.substr(space + 1));
  });
  return merges;
}

// Makes the token a special one, unless the files say what it is.
std::optional<std::int32_t> add_special(PipelineParts& parts, const std::string& content, bool left_strip = false) {
  for (auto& token : parts.added)
    if (token.content == content) {
      token.special = true;
      return token.id;
    }
  const auto id = parts.model->vocabulary().id(content);
  if (id) parts.added.push_back({content, *id, true, false, left_strip, false, false});
  return id;
}

}  // namespace

PipelineParts read_gpt2(const std::string& file, std::string_view vocabulary, std::string_view merges,
                        const TokenizerConfig& config) {
  const bool roberta = config.tokenizer_class == "RobertaTokenizer";
  if (!roberta && !config.tokenizer_class.empty() && config.tokenizer_class != "GPT2Tokenizer")
    refuse(file, "the files of a " + config.tokenizer_class.substr(0, 80),
           "those of a GPT2Tokenizer or RobertaTokenizer. Hint: a folder with its tokenizer.json");
  const auto root = JsonNode::read(file, vocabulary);
  PipelineParts parts;
  parts.kind = "byte-level BPE";
  parts.added = config.added;
  if (!root.is(Json::Kind::Object)) root.fail(root.json().kind_name(), "an object of tokens with their ids");
  std::vector<std::pair<std::string, std::int64_t>> tokens;
  for (const auto& [token, id] : root.json().fields) {
    if (!id.is(Json::Kind::Integer)) root.at(token).fail(id.kind_name(), "an id");
    tokens.emplace_back(token, id.integer);
  }
  BpeOptions options;
  options.bytes = true;
  try {
    parts.model = bpe_model(Vocabulary(std::move(tokens)), merges_of("merges.txt of " + file, merges), options);
  } catch (const std::invalid_argument& e) {
    refuse(file, e.what(), "a vocabulary and its merges");
  }
  parts.pre_tokenizers.push_back(split_byte_level(config.prefix_space.value_or(false), true));
  parts.decodes = true;
  parts.decoders.push_back(decode_byte_level());
  auto names = config;
  if (roberta) {
    const auto begin = add_special(parts, names.classifier.value_or("<s>"));
    const auto end = add_special(parts, names.separator.value_or("</s>"));
    if (!begin || !end) refuse(file, "a RobertaTokenizer without <s> or </s>", "both in the vocabulary");
    for (const auto* token : {"<unk>", "<pad>"}) (void)add_special(parts, token);
    (void)add_special(parts, names.mask.value_or("<mask>"), true);
    parts.single = {{.ids = {*begin}}, {.text = 0}, {.ids = {*end}}};
    parts.pair = {{.ids = {*begin}}, {.text = 0}, {.ids = {*end, *end}}, {.text = 1}, {.ids = {*end}}};
    parts.trim_offsets = true;
    parts.space_was_added = config.prefix_space.value_or(false);
  } else {
    const auto end = add_special(parts, names.end.value_or("<|endoftext|>"));
    const auto begin = names.begin && names.begin != names.end ? add_special(parts, *names.begin) : end;
    parts.special.end = end;
    parts.special.begin = begin;
    if ((config.add_begin.value_or(false) && !begin) || (config.add_end.value_or(false) && !end))
      refuse(file, "add_bos_token or add_eos_token without the token", "one in the vocabulary");
    for (auto* items : {&parts.single, &parts.pair})
      for (std::size_t at = items->size(); at-- > 0;) {
        const auto place = items->begin() + static_cast<std::ptrdiff_t>(at);
        const auto type = place->type;
        if (config.add_end.value_or(false)) items->insert(place + 1, {.ids = {*end}, .type = type});
        if (config.add_begin.value_or(false))
          items->insert(items->begin() + static_cast<std::ptrdiff_t>(at), {.ids = {*begin}, .type = type});
      }
  }
  resolve_special(file, names, true, parts);
  return parts;
}

PipelineParts read_vocabulary_text(const std::string& file, std::string_view text, const TokenizerConfig& config) {
  static constexpr std::array<std::string_view, 4> kClasses{"", "BertTokenizer", "DistilBertTokenizer",
                                                            "ElectraTokenizer"};
  if (std::find(kClasses.begin(), kClasses.end(), config.tokenizer_class) == kClasses.end())
    refuse(file, "the vocabulary of a " + config.tokenizer_class.substr(0, 80),
           "that of a BertTokenizer. Hint: a folder with its tokenizer.json");
  check_utf8(file, text);
  std::vector<std::pair<std::string, std::int64_t>> tokens;
  each_line(text, [&](std::string_view line, std::int64_t number) {
    while (!line.empty()) {  // white space at the end is not part of a token
      auto last = line.size() - 1;
      while (last > 0 && (static_cast<unsigned char>(line[last]) & 0xc0) == 0x80) --last;
      if (!is_white_space(first_code_point(line.substr(last)).code)) break;
      line.remove_suffix(line.size() - last);
    }
    tokens.emplace_back(line, number - 1);
  });
  PipelineParts parts;
  parts.kind = "WordPiece";
  parts.added = config.added;
  const auto unknown = config.unknown.value_or("[UNK]");
  try {
    parts.model = wordpiece_model(Vocabulary(std::move(tokens)), unknown, "##", 100);
  } catch (const std::invalid_argument& e) {
    refuse(file, e.what(), "a vocabulary with a token a line");
  }
  BertOptions options;
  options.lower_case = config.lower_case.value_or(true);
  options.strip_accents = config.strip_accents.value_or(options.lower_case);
  options.chinese_characters = config.chinese_characters.value_or(true);
  parts.normalizers.push_back(bert(options));
  parts.pre_tokenizers.push_back(split_bert());
  parts.decodes = true;
  parts.decoders.push_back(decode_wordpiece("##", true));
  (void)add_special(parts, unknown);
  (void)add_special(parts, config.padding.value_or("[PAD]"));
  (void)add_special(parts, config.mask.value_or("[MASK]"));
  const auto begin = add_special(parts, config.classifier.value_or("[CLS]"));
  const auto end = add_special(parts, config.separator.value_or("[SEP]"));
  if (!begin || !end) refuse(file, "a vocabulary without [CLS] or [SEP]", "both");
  parts.single = {{.ids = {*begin}}, {.text = 0}, {.ids = {*end}}};
  parts.pair = {{.ids = {*begin}}, {.text = 0}, {.ids = {*end}}, {.text = 1, .type = 1}, {.ids = {*end}, .type = 1}};
  resolve_special(file, config, true, parts);
  return parts;
}

}  // namespace data
