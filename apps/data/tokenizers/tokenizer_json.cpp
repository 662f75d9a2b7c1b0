// tokenizer.json: its components one by one. What has no row here is refused.
#include <algorithm>
#include <stdexcept>

#include "apps/data/tokenizers/decoders.h"
#include "apps/data/tokenizers/normalizers.h"
#include "apps/data/tokenizers/pre_tokenizers.h"
#include "apps/data/tokenizers/readers.h"

namespace data {
namespace {

constexpr int kMostComponents = 64;

// Calls take(component) for a component, or for each of a sequence's, also of sequences in it.
template <class Take>
void each_component(const JsonNode& node, const char* list, const Take& take) {
  std::vector<JsonNode> open{node};
  for (int seen = 0; !open.empty(); ++seen) {
    if (seen > kMostComponents) node.fail("more than " + std::to_string(kMostComponents) + " components", "fewer");
    const auto next = open.back();
    open.pop_back();
    if (next.type() != "Sequence") {
      take(next);
      continue;
    }
    next.only({"type", list});
    auto inside = next.at(list).items();
    open.insert(open.end(), inside.rbegin(), inside.rend());
  }
}

// {"String": "x"} or {"Regex": "x"}.
Pattern pattern_of(const JsonNode& node) {
  node.only({"String", "Regex"});
  try {
    if (node.has("Regex")) return Pattern(node.at("Regex").text());
    return Pattern::literal(node.at("String").text());
  } catch (const std::invalid_argument& e) {
    node.unsupported(e.what(), "an expression of characters, classes, groups, look-around and repetitions");
  }
}

SplitBehavior behavior_of(const JsonNode& node) {
  static const std::vector<std::pair<std::string, SplitBehavior>> kNames{
      {"Removed", SplitBehavior::Removed},
      {"Isolated", SplitBehavior::Isolated},
      {"MergedWithPrevious", SplitBehavior::MergedWithPrevious},
      {"MergedWithNext", SplitBehavior::MergedWithNext},
      {"Contiguous", SplitBehavior::Contiguous}};
  for (const auto& [name, behavior] : kNames)
    if (node.text() == name) return behavior;
  node.unsupported("\"" + node.text() + "\"", "Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

std::shared_ptr<const Charsmap> charsmap_of(const JsonNode& node) {
  try {
    return std::make_shared<const Charsmap>(base64_decoded(node.text()));
  } catch (const std::invalid_argument& e) {
    node.fail(e.what(), "a compiled charsmap in base64");
  }
}

void add_normalizer(const JsonNode& node, std::vector<Normalizer>& all) {
  const auto type = node.type();
  if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    node.only({"type"});
    all.push_back(to_normal_form(type == "NFC"    ? NormalForm::Nfc
                                 : type == "NFD"  ? NormalForm::Nfd
                                 : type == "NFKC" ? NormalForm::Nfkc
                                                  : NormalForm::Nfkd));
  } else if (type == "Lowercase" || type == "StripAccents" || type == "Nmt") {
    node.only({"type"});
    all.push_back(type == "Lowercase" ? to_lower_case() : type == "Nmt" ? nmt() : without_accents(true));
  } else if (type == "Strip") {
    node.only({"type", "strip_left", "strip_right"});
    all.push_back(stripped(node.boolean_or("strip_left", true), node.boolean_or("strip_right", true)));
  } else if (type == "Prepend") {
    node.only({"type", "prepend"});
    all.push_back(prepended(node.at("prepend").text()));
  } else if (type == "Replace") {
    node.only({"type", "pattern", "content"});
    all.push_back(replaced(pattern_of(node.at("pattern")), node.at("content").text()));
  } else if (type == "Precompiled") {
    node.only({"type", "precompiled_charsmap"});
    if (node.has("precompiled_charsmap")) all.push_back(precompiled(charsmap_of(node.at("precompiled_charsmap"))));
  } else if (type == "BertNormalizer") {
    node.only({"type", "clean_text", "handle_chinese_chars", "strip_accents", "lowercase"});
    BertOptions options;
    options.clean_text = node.boolean_or("clean_text", true);
    options.chinese_characters = node.boolean_or("handle_chinese_chars", true);
    options.lower_case = node.boolean_or("lowercase", true);
    options.strip_accents = node.boolean_or("strip_accents", options.lower_case);
    all.push_back(bert(options));
  } else {
    node.unsupported(
        "the normalizer \"" + type + "\"",
        "BertNormalizer, Lowercase, NFC, NFD, NFKC, NFKD, Nmt, Precompiled, Prepend, Replace, Sequence, Strip "
        "or StripAccents");
  }
}

PrependScheme scheme_of(const JsonNode& node) {
  if (node.has("add_prefix_space") && !node.has("prepend_scheme"))
    return node.at("add_prefix_space").boolean() ? PrependScheme::Always : PrependScheme::Never;
  const auto scheme = node.text_or("prepend_scheme", "always");
  if (scheme == "always") return PrependScheme::Always;
  if (scheme == "first") return PrependScheme::First;
  if (scheme == "never") return PrependScheme::Never;
  node.at("prepend_scheme").fail("\"" + scheme.substr(0, 40) + "\"", "always, first or never");
}

void only_metaspace(const JsonNode& node) {
  node.only({"type", "replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"});
}

// Returns whether the pieces are bytes from here on.
bool add_pre_tokenizer(const JsonNode& node, std::vector<PreTokenizer>& all) {
  const auto type = node.type();
  if (type == "ByteLevel") {
    node.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    all.push_back(split_byte_level(node.boolean_or("add_prefix_space", true), node.boolean_or("use_regex", true)));
    return true;
  }
  if (type == "Metaspace") {
    only_metaspace(node);
    all.push_back(split_metaspace(node.at("replacement").text(), scheme_of(node), node.boolean_or("split", true)));
  } else if (type == "Split") {
    node.only({"type", "pattern", "behavior", "invert"});
    all.push_back(
        split_by(pattern_of(node.at("pattern")), behavior_of(node.at("behavior")), node.boolean_or("invert", false)));
  } else if (type == "Punctuation") {
    node.only({"type", "behavior"});
    all.push_back(split_characters(is_punctuation,
                                   node.has("behavior") ? behavior_of(node.at("behavior")) : SplitBehavior::Isolated));
  } else if (type == "Digits") {
    node.only({"type", "individual_digits"});
    all.push_back(split_characters(
        is_numeric, node.boolean_or("individual_digits", false) ? SplitBehavior::Isolated : SplitBehavior::Contiguous));
  } else if (type == "CharDelimiterSplit") {
    node.only({"type", "delimiter"});
    const auto& delimiter = node.at("delimiter").text();
    if (delimiter.empty() || first_code_point(delimiter).bytes != delimiter.size())
      node.at("delimiter").fail("\"" + delimiter.substr(0, 40) + "\"", "one character");
    all.push_back(split_characters([code = first_code_point(delimiter).code](std::int32_t c) { return c == code; },
                                   SplitBehavior::Removed));
  } else if (type == "Whitespace" || type == "WhitespaceSplit" || type == "BertPreTokenizer") {
    node.only({"type"});
    all.push_back(type == "Whitespace"        ? split_words()
                  : type == "WhitespaceSplit" ? split_characters(is_white_space, SplitBehavior::Removed)
                                              : split_bert());
  } else {
    node.unsupported(
        "the pre-tokenizer \"" + type + "\"",
        "BertPreTokenizer, ByteLevel, CharDelimiterSplit, Digits, Metaspace, Punctuation, Sequence, Split, "
        "Whitespace or WhitespaceSplit");
  }
  return false;
}

void add_decoder(const JsonNode& node, std::vector<Decoder>& all) {
  const auto type = node.type();
  if (type == "ByteLevel") {
    node.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    all.push_back(decode_byte_level());
  } else if (type == "WordPiece") {
    node.only({"type", "prefix", "cleanup"});
    all.push_back(decode_wordpiece(node.text_or("prefix", "##"), node.boolean_or("cleanup", true)));
  } else if (type == "Metaspace") {
    only_metaspace(node);
    all.push_back(decode_metaspace(node.at("replacement").text(), scheme_of(node) != PrependScheme::Never));
  } else if (type == "BPEDecoder") {
    node.only({"type", "suffix"});
    all.push_back(decode_bpe(node.text_or("suffix", "</w>")));
  } else if (type == "ByteFallback" || type == "Fuse") {
    node.only({"type"});
    all.push_back(type == "Fuse" ? decode_fused() : decode_byte_fallback());
  } else if (type == "Strip") {
    node.only({"type", "content", "start", "stop"});
    const auto& content = node.at("content").text();
    if (content.empty()) node.at("content").fail("an empty text", "a character");
    all.push_back(decode_stripped(content, node.at("start").integer(0, 1000), node.at("stop").integer(0, 1000)));
  } else if (type == "Replace") {
    node.only({"type", "pattern", "content"});
    all.push_back(decode_replaced(pattern_of(node.at("pattern")), node.at("content").text()));
  } else {
    node.unsupported("the decoder \"" + type + "\"",
                     "BPEDecoder, ByteFallback, ByteLevel, Fuse, Metaspace, Replace, Sequence, Strip or WordPiece");
  }
}

std::int32_t id_in(const JsonNode& node) { return static_cast<std::int32_t>(node.integer(0, INT32_MAX)); }

// ["[SEP]", 102]
TemplateItem token_item(const JsonNode& node, std::uint8_t type) {
  const auto items = node.items();
  if (items.size() != 2) node.fail("a list of " + std::to_string(items.size()), "a token and its id");
  (void)items[0].text();
  return {.ids = {id_in(items[1])}, .type = type};
}

std::vector<TemplateItem> template_of(const JsonNode& list, const JsonNode& tokens) {
  std::vector<TemplateItem> result;
  for (const auto& node : list.items()) {
    node.only({"Sequence", "SpecialToken"});
    const bool text = node.has("Sequence");
    const auto piece = node.at(text ? "Sequence" : "SpecialToken");
    piece.only({"id", "type_id"});
    TemplateItem item;
    item.type = static_cast<std::uint8_t>(piece.at("type_id").integer(0, 255));
    const auto& id = piece.at("id").text();
    if (text) {
      if (id != "A" && id != "B") piece.at("id").fail("\"" + id.substr(0, 40) + "\"", "A or B");
      item.text = id == "B" ? 1 : 0;
    } else {
      const auto token = tokens.at(id);
      token.only({"id", "ids", "tokens"});
      for (const auto& one : token.at("ids").items()) item.ids.push_back(id_in(one));
    }
    result.push_back(std::move(item));
  }
  return result;
}

void add_post_processor(const JsonNode& node, PipelineParts& parts) {
  const auto type = node.type();
  if (type == "ByteLevel") {
    node.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    parts.trim_offsets = node.boolean_or("trim_offsets", true);
    parts.space_was_added = node.boolean_or("add_prefix_space", true);
  } else if (type == "TemplateProcessing") {
    node.only({"type", "single", "pair", "special_tokens"});
    parts.single = template_of(node.at("single"), node.at("special_tokens"));
    parts.pair = template_of(node.at("pair"), node.at("special_tokens"));
  } else if (type == "BertProcessing") {
    node.only({"type", "sep", "cls"});
    const auto end = node.at("sep"), begin = node.at("cls");
    parts.single = {token_item(begin, 0), {.text = 0}, token_item(end, 0)};
    parts.pair = {token_item(begin, 0), {.text = 0}, token_item(end, 0), {.text = 1, .type = 1}, token_item(end, 1)};
  } else if (type == "RobertaProcessing") {
    node.only({"type", "sep", "cls", "trim_offsets", "add_prefix_space"});
    const auto end = token_item(node.at("sep"), 0), begin = token_item(node.at("cls"), 0);
    parts.single = {begin, {.text = 0}, end};
    parts.pair = {begin, {.text = 0}, end, end, {.text = 1}, end};
    parts.trim_offsets = node.boolean_or("trim_offsets", true);
    parts.space_was_added = node.boolean_or("add_prefix_space", true);
  } else {
    node.unsupported("the post-processor \"" + type + "\"",
                     "BertProcessing, ByteLevel, RobertaProcessing, Sequence or TemplateProcessing");
  }
}

std::vector<std::pair<std::string, std::int64_t>> vocabulary_of(const JsonNode& node) {
  if (!node.is(Json::Kind::Object)) node.fail(node.json().kind_name(), "an object of tokens with their ids");
  std::vector<std::pair<std::string, std::int64_t>> tokens;
  tokens.reserve(node.json().fields.size());
  for (const auto& [token, id] : node.json().fields) {
    if (!id.is(Json::Kind::Integer)) node.at(token).fail(id.kind_name(), "an id");
    tokens.emplace_back(token, id.integer);
  }
  return tokens;
}

// "a b" or ["a", "b"]
std::vector<std::pair<std::string, std::string>> merges_of(const JsonNode& node) {
  std::vector<std::pair<std::string, std::string>> merges;
  if (!node.is(Json::Kind::List)) node.fail(node.json().kind_name(), "a list");
  merges.reserve(node.json().items.size());
  for (const auto& merge : node.json().items) {
    const auto refuse = [&] {
      node.fail("a merge of another form", "two tokens with a space between them, or in a list");
    };
    if (merge.is(Json::Kind::Text)) {
      const auto space = merge.text.find(' ');
      if (space == std::string::npos || merge.text.find(' ', space + 1) != std::string::npos) refuse();
      merges.emplace_back(merge.text.substr(0, space), merge.text.substr(space + 1));
    } else {
      if (merge.items.size() != 2 || !merge.items[0].is(Json::Kind::Text) || !merge.items[1].is(Json::Kind::Text))
        refuse();
      merges.emplace_back(merge.items[0].text, merge.items[1].text);
    }
  }
  return merges;
}

std::string model_type(const JsonNode& model) {
  if (model.has("type")) return model.type();
  if (model.has("merges")) return "BPE";  // files of tokenizers before 0.9 do not tell the type
  return model.at("vocab").is(Json::Kind::List) ? "Unigram" : "WordPiece";
}

std::unique_ptr<Model> bpe_of(const JsonNode& node, bool bytes) {
  node.only({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
             "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (node.has("dropout") && node.at("dropout").number() != 0)
    node.at("dropout").unsupported("a dropout, which encodes at random", "null or 0");
  BpeOptions options;
  options.bytes = bytes;
  options.continuing_prefix = node.text_or("continuing_subword_prefix", "");
  options.end_suffix = node.text_or("end_of_word_suffix", "");
  options.fuse_unknown = node.boolean_or("fuse_unk", false);
  options.byte_fallback = node.boolean_or("byte_fallback", false);
  options.ignore_merges = node.boolean_or("ignore_merges", false);
  if (bytes && (!options.continuing_prefix.empty() || !options.end_suffix.empty()))
    node.unsupported("a prefix or suffix of words with ByteLevel", "neither");
  Vocabulary vocabulary(vocabulary_of(node.at("vocab")));
  const auto unknown = node.text_or("unk_token", "");
  // A vocabulary of all bytes never needs it.
  if (!unknown.empty() && (!bytes || vocabulary.id(unknown))) options.unknown = unknown;
  return bpe_model(std::move(vocabulary), merges_of(node.at("merges")), options);
}

std::unique_ptr<Model> unigram_of(const JsonNode& node) {
  node.only({"type", "unk_id", "vocab", "byte_fallback"});
  std::vector<std::pair<std::string, std::int64_t>> tokens;
  std::vector<double> scores;
  const auto list = node.at("vocab");
  if (!list.is(Json::Kind::List)) list.fail(list.json().kind_name(), "a list");
  for (const auto& item : list.json().items) {
    if (item.items.size() != 2 || !item.items[0].is(Json::Kind::Text) ||
        !(item.items[1].is(Json::Kind::Number) || item.items[1].is(Json::Kind::Integer)))
      list.fail("an entry of another form", "a token and its score");
    tokens.emplace_back(item.items[0].text, static_cast<std::int64_t>(tokens.size()));
    scores.push_back(item.items[1].number);
  }
  UnigramOptions options;
  if (node.has("unk_id")) options.unknown = id_in(node.at("unk_id"));
  options.byte_fallback = node.boolean_or("byte_fallback", false);
  return unigram_model(Vocabulary(std::move(tokens)), std::move(scores), options);
}

AddedToken added_token(const JsonNode& node) {
  node.only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
  const auto& content = node.at("content").text();
  if (content.empty()) node.at("content").fail("an empty text", "a token");
  const bool special = node.boolean_or("special", false);
  return {content,
          id_in(node.at("id")),
          special,
          node.boolean_or("single_word", false),
          node.boolean_or("lstrip", false),
          node.boolean_or("rstrip", false),
          node.boolean_or("normalized", !special)};
}

}  // namespace

std::unique_ptr<Model> read_model(const JsonNode& node, bool bytes) {
  const auto type = model_type(node);
  try {
    if (type == "BPE") return bpe_of(node, bytes);
    if (bytes) node.unsupported("the model \"" + type + "\" with the pre-tokenizer ByteLevel", "BPE");
    if (type == "Unigram") return unigram_of(node);
    if (type == "WordPiece") {
      node.only({"type", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab"});
      return wordpiece_model(
          Vocabulary(vocabulary_of(node.at("vocab"))), node.text_or("unk_token", "[UNK]"),
          node.text_or("continuing_subword_prefix", "##"),
          node.has("max_input_chars_per_word") ? node.at("max_input_chars_per_word").integer(0, 1 << 20) : 100);
    }
  } catch (const std::invalid_argument& e) {
    node.fail(e.what(), "a " + type + " model");
  }
  node.unsupported("the model \"" + type + "\"", "BPE, Unigram or WordPiece");
}

PipelineParts read_tokenizer_json(const std::string& file, std::string_view text) {
  const auto root = JsonNode::read(file, text);
  // Lengths are the caller's affair: truncation and padding are not applied.
  root.only({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
             "decoder", "model"});
  PipelineParts parts;
  if (const auto node = root.find("normalizer"))
    each_component(*node, "normalizers", [&](const JsonNode& one) { add_normalizer(one, parts.normalizers); });
  bool bytes = false;
  if (const auto node = root.find("pre_tokenizer"))
    each_component(*node, "pretokenizers", [&](const JsonNode& one) {
      if (bytes) one.unsupported("a pre-tokenizer behind ByteLevel", "ByteLevel as the last one");
      bytes = add_pre_tokenizer(one, parts.pre_tokenizers);
    });
  if (const auto node = root.find("post_processor"))
    each_component(*node, "processors", [&](const JsonNode& one) { add_post_processor(one, parts); });
  if (const auto node = root.find("decoder")) {
    parts.decodes = true;
    each_component(*node, "decoders", [&](const JsonNode& one) { add_decoder(one, parts.decoders); });
  }
  if (const auto node = root.find("added_tokens"))
    for (const auto& one : node->items()) parts.added.push_back(added_token(one));
  const auto model = root.at("model");
  parts.model = read_model(model, bytes);
  const auto type = model_type(model);
  parts.kind = bytes ? "byte-level BPE" : type;
  return parts;
}

}  // namespace data
