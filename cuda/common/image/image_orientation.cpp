// Orientation of pictures: the EXIF and XMP of JPEG, PNG and WebP files. Damaged or missing, they never make a file unreadable.
// Of EXIF only the entries of the first directory are read, one after the other: offsets from directory to directory, of
// which a file can make a loop, are not followed.
#include "image_orientation.h"

#include <libdeflate.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

namespace mimo {
namespace {

/// EXIF and XMP beyond this size are cut off; Pillow's limit of a PNG's text too.
constexpr size_t longest_text = 1 << 20;

struct Metadata {
  std::vector<uint8_t> exif;
  std::vector<uint8_t> xmp;
};

std::string_view text_of(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

void append(std::vector<uint8_t>& to, Bytes part) {
  const Bytes fitting = part.first(std::min(part.size(), longest_text - to.size()));
  to.insert(to.end(), fitting.begin(), fitting.end());
}

void replace(std::vector<uint8_t>& to, Bytes by) {
  to.clear();
  append(to, by);
}

uint64_t number(Bytes at, bool big_endian) {
  uint64_t value = 0;
  for (size_t i = 0; i < at.size(); ++i) value = value << 8 | at[big_endian ? i : at.size() - 1 - i];
  return value;
}

uint32_t big_endian_32(const uint8_t* at) { return static_cast<uint32_t>(number({at, 4}, true)); }
uint32_t little_endian_32(const uint8_t* at) { return static_cast<uint32_t>(number({at, 4}, false)); }

constexpr std::string_view exif_mark{"Exif\0\0", 6};
constexpr std::string_view xmp_mark{"http://ns.adobe.com/xap/1.0/\0", 29};

/// Segments before the first scan, with bytes between them skipped.
Metadata jpeg_metadata(Bytes file) {
  Metadata found;
  for (size_t at = 2; at + 1 < file.size();) {
    if (file[at] != 0xFF) {
      ++at;
      continue;
    }
    const uint8_t marker = file[at + 1];
    if (marker == 0xFF) {
      ++at;
      continue;
    }
    at += 2;
    const bool stands_alone = marker == 0 || marker == 0xC8 || (marker >= 0xD0 && marker <= 0xD9) || (marker >= 0xF0 && marker <= 0xFD);
    if (stands_alone) continue;
    if (marker < 0xC0 || marker == 0xDA || file.size() - at < 2) break;
    const size_t size = std::max<size_t>(2, size_t{file[at]} << 8 | file[at + 1]);
    if (file.size() - at < size) break;
    const Bytes segment = file.subspan(at + 2, size - 2);
    at += size;
    if (marker != 0xE1) continue;
    if (text_of(segment).starts_with(exif_mark)) {
      append(found.exif, found.exif.empty() ? segment : segment.subspan(exif_mark.size()));
    } else if (text_of(segment).starts_with(xmp_mark)) {
      replace(found.xmp, segment.subspan(xmp_mark.size()));
    }
  }
  return found;
}

std::vector<uint8_t> inflated(Bytes packed) {
  struct Free {
    void operator()(libdeflate_decompressor* one) const { libdeflate_free_decompressor(one); }
  };
  const std::unique_ptr<libdeflate_decompressor, Free> decompressor(libdeflate_alloc_decompressor());
  if (!decompressor) throw std::bad_alloc();
  std::vector<uint8_t> text(longest_text);
  size_t size = 0;
  const auto outcome =
      libdeflate_zlib_decompress(decompressor.get(), packed.data(), packed.size(), text.data(), text.size(), &size);
  text.resize(outcome == LIBDEFLATE_SUCCESS ? size : 0);
  return text;
}

/// The bytes behind the first `count` bytes of zero; empty where there are fewer of these.
Bytes behind_zeros(Bytes bytes, int count) {
  for (; count > 0; --count) {
    const auto zero = std::find(bytes.begin(), bytes.end(), uint8_t{0});
    if (zero == bytes.end()) return {};
    bytes = bytes.subspan(static_cast<size_t>(zero - bytes.begin()) + 1);
  }
  return bytes;
}

/// The text of a tEXt, zTXt or iTXt chunk behind its key.
std::vector<uint8_t> png_text(std::string_view chunk, Bytes data) {
  Bytes text = behind_zeros(data, 1);
  bool packed = false;
  if (chunk == "zTXt") {
    packed = true;
    text = text.subspan(std::min<size_t>(1, text.size()));
  } else if (chunk == "iTXt") {
    packed = !text.empty() && text[0] != 0;
    text = text.size() < 2 ? Bytes{} : behind_zeros(text.subspan(2), 2);
  }
  if (packed) return inflated(text);
  std::vector<uint8_t> plain;
  append(plain, text);
  return plain;
}

/// ImageMagick's EXIF: three lines, then digits of base sixteen; empty where another character is among them.
std::vector<uint8_t> raw_profile(const std::vector<uint8_t>& text) {
  auto at = text.begin();
  for (int line = 0; line < 3; ++line) {
    at = std::find(at, text.end(), uint8_t{'\n'});
    if (at == text.end()) return {};
    ++at;
  }
  std::vector<uint8_t> bytes;
  int high = -1;
  for (; at != text.end(); ++at) {
    if (*at == '\n' || *at == ' ') continue;
    const uint8_t lower = *at | 32;
    const int digit = *at >= '0' && *at <= '9' ? *at - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
    if (digit < 0) return {};
    if (high >= 0) bytes.push_back(static_cast<uint8_t>(high << 4 | digit));
    high = high >= 0 ? -1 : digit;
  }
  return high >= 0 ? std::vector<uint8_t>{} : bytes;
}

/// The last eXIf chunk, else the last ImageMagick profile; the last XMP text. Chunks may follow the picture; those of further
/// pictures of an animation are left out.
Metadata png_metadata(Bytes file) {
  struct Text {
    std::string_view chunk;
    Bytes data;
  };
  Metadata found;
  bool has_exif = false, behind_picture = false;
  Text profile, xmp;
  for (size_t at = 8; at < file.size() && file.size() - at >= 12;) {
    const size_t size = big_endian_32(file.data() + at);
    if (file.size() - at - 12 < size) break;
    const std::string_view name = text_of(file.subspan(at + 4, 4));
    const Bytes data = file.subspan(at + 8, size);
    at += 12 + size;
    if (name == "IEND" || (name == "fcTL" && behind_picture)) break;
    if (name == "IDAT") behind_picture = true;
    const bool is_text = name == "tEXt" || name == "zTXt" || name == "iTXt";
    const std::string_view key = is_text ? text_of(data).substr(0, text_of(data).find('\0')) : "";
    if (name == "eXIf" || (name == "tEXt" && key == "exif")) {
      replace(found.exif, name == "eXIf" ? data : behind_zeros(data, 1));
      has_exif = true;
    } else if (key == "Raw profile type exif") {
      profile = {name, data};
    } else if (key == "XML:com.adobe.xmp") {
      xmp = {name, data};
    }
  }
  if (!has_exif && !profile.data.empty()) found.exif = raw_profile(png_text(profile.chunk, profile.data));
  if (!xmp.data.empty()) found.xmp = png_text(xmp.chunk, xmp.data);
  return found;
}

/// The first EXIF and XMP chunk, where the header announces it.
Metadata webp_metadata(Bytes file) {
  constexpr uint8_t announces_xmp = 4, announces_exif = 8;
  constexpr size_t first_chunk = 12, chunk_head = 8;
  Metadata found;
  if (file.size() < first_chunk + chunk_head + 1 || text_of(file.subspan(first_chunk, 4)) != "VP8X") return found;
  const uint8_t announced = file[first_chunk + chunk_head];
  const size_t end = std::min(file.size(), size_t{little_endian_32(file.data() + 4)} + chunk_head);
  for (size_t at = first_chunk; at < end && end - at >= chunk_head;) {
    const size_t size = little_endian_32(file.data() + at + 4);
    if (end - at - chunk_head < size) break;
    const std::string_view name = text_of(file.subspan(at, 4));
    const Bytes data = file.subspan(at + chunk_head, size);
    if (name == "EXIF" && (announced & announces_exif) != 0 && found.exif.empty()) append(found.exif, data);
    if (name == "XMP " && (announced & announces_xmp) != 0 && found.xmp.empty()) append(found.xmp, data);
    at += chunk_head + size + size % 2;
  }
  return found;
}

/// Types of EXIF values by number: their bytes, and whether they are numbers.
struct ValueType {
  size_t bytes;
  enum { other, natural, integer, fraction, signed_fraction, single, real } kind;
};
constexpr ValueType value_types[] = {
    {0, ValueType::other},          {1, ValueType::other},           {1, ValueType::other},  {2, ValueType::natural},
    {4, ValueType::natural},        {8, ValueType::fraction},        {1, ValueType::integer}, {1, ValueType::other},
    {2, ValueType::integer},        {4, ValueType::integer},         {8, ValueType::signed_fraction},
    {4, ValueType::single},         {8, ValueType::real},            {4, ValueType::natural}, {0, ValueType::other},
    {0, ValueType::other},          {8, ValueType::natural},
};

double value_of(const ValueType& type, Bytes at, bool big_endian) {
  const uint64_t bits = number(at.first(type.bytes), big_endian);
  const auto low = static_cast<uint32_t>(bits);
  const auto sign_extended = [&](uint64_t value, size_t bytes) {
    const unsigned unused = 64 - 8 * static_cast<unsigned>(bytes);
    return static_cast<double>(static_cast<int64_t>(value << unused) >> unused);
  };
  const auto part = [&](size_t from) { return number(at.subspan(from, 4), big_endian); };
  float single;
  double real;
  switch (type.kind) {
    case ValueType::natural: return static_cast<double>(bits);
    case ValueType::integer: return sign_extended(bits, type.bytes);
    case ValueType::fraction: return static_cast<double>(part(0)) / static_cast<double>(part(4));
    case ValueType::signed_fraction: return sign_extended(part(0), 4) / sign_extended(part(4), 4);
    case ValueType::single: std::memcpy(&single, &low, 4); return single;
    case ValueType::real: std::memcpy(&real, &bits, 8); return real;
    default: return 1;
  }
}

/// The orientation's value in EXIF, 1 if it is no number or the EXIF has no known header; nothing if EXIF has none.
std::optional<double> exif_orientation(Bytes exif) {
  constexpr uint64_t orientation_tag = 0x112;
  constexpr size_t header_bytes = 8, entry_bytes = 12;
  for (int i = 0; i < 2 && text_of(exif).starts_with(exif_mark); ++i) exif = exif.subspan(exif_mark.size());
  if (exif.empty()) return std::nullopt;
  if (exif.size() < header_bytes) return 1;
  const std::string_view start = text_of(exif.first(4));
  const bool big_endian = start == std::string_view("MM\0*", 4) || start == std::string_view("MM*\0", 4);
  if (!big_endian && start != std::string_view("II*\0", 4) && start != std::string_view("II\0*", 4)) return 1;
  size_t at = number(exif.subspan(4, 4), big_endian);
  if (at > exif.size() || exif.size() - at < 2) return std::nullopt;
  uint64_t entries = number(exif.subspan(at, 2), big_endian);
  for (at += 2; entries > 0 && exif.size() - at >= entry_bytes; --entries, at += entry_bytes) {
    const Bytes entry = exif.subspan(at, entry_bytes);
    if (number(entry.first(2), big_endian) != orientation_tag) continue;
    const uint64_t type = number(entry.subspan(2, 2), big_endian);
    if (type >= std::size(value_types) || value_types[type].bytes == 0) continue;
    const uint64_t size = number(entry.subspan(4, 4), big_endian) * value_types[type].bytes;
    if (size == 0) continue;
    const uint64_t offset = size <= 4 ? at + 8 : number(entry.subspan(8, 4), big_endian);
    if (offset > exif.size() || exif.size() - offset < size) return std::nullopt;
    return value_of(value_types[type], exif.subspan(offset, size), big_endian);
  }
  return std::nullopt;
}

/// The orientation in an XMP packet, as an attribute or an element: the digit after the first tag of that name.
int xmp_orientation(Bytes xmp) {
  constexpr std::string_view tag = "tiff:Orientation";
  const std::string_view text = text_of(xmp);
  for (size_t at = text.find(tag); at != text.npos; at = text.find(tag, at + 1)) {
    std::string_view rest = text.substr(at + tag.size());
    const size_t before_digit = rest.starts_with("=\"") ? 2 : rest.starts_with(">") ? 1 : 0;
    if (before_digit == 0 || rest.size() <= before_digit) continue;
    const char digit = rest[before_digit];
    if (digit >= '0' && digit <= '9') return digit - '0';
  }
  return 1;
}

}  // namespace

int orientation_of(ImageFormat format, Bytes file) {
  Metadata found;
  switch (format) {
    case ImageFormat::jpeg: found = jpeg_metadata(file); break;
    case ImageFormat::png: found = png_metadata(file); break;
    case ImageFormat::webp: found = webp_metadata(file); break;
    default: return 1;
  }
  const std::optional<double> of_exif = exif_orientation(found.exif);
  const double value = of_exif ? *of_exif : xmp_orientation(found.xmp);
  for (int known = 2; known <= 8; ++known) {
    if (value == known) return known;
  }
  return 1;
}

void turn_pixels(const uint8_t* in, int width, int height, int orientation, uint8_t* out) {
  const bool exchanged = exchanges_sides(orientation);
  const bool from_right = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  const bool from_bottom = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  const int columns = exchanged ? height : width, rows = exchanged ? width : height;
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column, out += 3) {
      const int x = exchanged ? row : column, y = exchanged ? column : row;
      const int64_t from = int64_t{from_bottom ? height - 1 - y : y} * width + (from_right ? width - 1 - x : x);
      std::memcpy(out, in + 3 * from, 3);
    }
  }
}

}  // namespace mimo
