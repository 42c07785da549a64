// BMP files with Pillow's semantics: 1 to 32 bits, with a palette, bit masks or run-length encoding.
#include <algorithm>
#include <cstring>
#include <string_view>

#include "image_file.h"

namespace mimo {
namespace {

constexpr uint32_t uncompressed = 0, run_lengths_8 = 1, run_lengths_4 = 2, masked = 3;
constexpr size_t file_header_bytes = 14;

/// Reads little-endian numbers of the file; throws at its end.
class Numbers {
 public:
  explicit Numbers(Bytes bytes) : bytes_(bytes) {}
  uint32_t u16(size_t at) const { return part(at, 2)[0] | uint32_t{part(at, 2)[1]} << 8; }
  uint32_t u32(size_t at) const { return u16(at) | u16(at + 2) << 16; }
  Bytes part(size_t at, size_t size) const {
    if (at > bytes_.size() || bytes_.size() - at < size) refuse_cut_off();
    return bytes_.subspan(at, size);
  }
  size_t size() const { return bytes_.size(); }

 private:
  Bytes bytes_;
};

/// Bit masks of red, green, blue and alpha in a 32-bit pixel.
struct Layout {
  uint32_t masks[4];
  std::string_view order;
};

constexpr Layout layouts_32[] = {
    {{0xFF0000, 0xFF00, 0xFF, 0}, "BGRX"},          {{0xFF000000, 0xFF0000, 0xFF00, 0}, "XBGR"},
    {{0xFF000000, 0xFF00, 0xFF, 0}, "BGXR"},        {{0xFF000000, 0xFF0000, 0xFF00, 0xFF}, "ABGR"},
    {{0xFF, 0xFF00, 0xFF0000, 0xFF000000}, "RGBA"}, {{0xFF0000, 0xFF00, 0xFF, 0xFF000000}, "BGRA"},
    {{0xFF000000, 0xFF00, 0xFF, 0xFF0000}, "BGAR"}, {{0, 0, 0, 0}, "BGRA"},
};

class BmpFile final : public ImageFile {
 public:
  explicit BmpFile(Bytes bytes) : ImageFile(ImageFormat::bmp, PixelMode::rgb), file_(bytes) {
    const size_t header_bytes = file_.u32(file_header_bytes);
    constexpr size_t known[] = {12, 40, 52, 56, 64, 108, 124};
    if (std::find(std::begin(known), std::end(known), header_bytes) == std::end(known)) {
      refuse_damaged("its header has " + std::to_string(header_bytes) + " bytes");
    }
    const size_t behind_header = file_header_bytes + header_bytes;
    file_.part(0, behind_header);
    size_t colours = 0;
    size_t colour_bytes = 4;
    if (header_bytes == 12) {
      set_size(file_.u16(18), file_.u16(20));
      bits_ = file_.u16(24);
      colour_bytes = 3;
    } else {
      const uint32_t height = file_.u32(22);
      from_top_ = height >> 24 == 0xFF;
      set_size(file_.u32(18), from_top_ ? int64_t{1} + static_cast<uint32_t>(~height) : int64_t{height});
      bits_ = file_.u16(28);
      compression_ = file_.u32(30);
      colours = file_.u32(46);
    }
    if (bits_ != 1 && bits_ != 4 && bits_ != 8 && bits_ != 16 && bits_ != 24 && bits_ != 32) {
      refuse_damaged("its pixels have " + std::to_string(bits_) + " bits");
    }
    if (compression_ > masked) refuse_unread("a BMP that holds another kind of file");
    if (colours == 0) colours = size_t{1} << std::min(bits_, 31u);
    size_t read_to = behind_header;
    if (compression_ == masked) read_to = read_masks(header_bytes, behind_header);
    pixels_at_ = file_.u32(10);
    if (bits_ <= 8) {
      if (colours > 65536) refuse_damaged("its palette has " + std::to_string(colours) + " colours");
      if (pixels_at_ == behind_header) pixels_at_ += colour_bytes * colours;
      read_palette(file_.part(read_to, colour_bytes * colours), colours, colour_bytes);
      read_to += colour_bytes * colours;
    }
    if (pixels_at_ == 0) pixels_at_ = read_to;
    header_.channels = bits_ <= 8 ? 1 : bytes_of(header_.mode);
  }

  /// Of run lengths, the indexes.
  int64_t working_bytes() const override { return header_.area(); }

  void read(uint8_t* pixels) override {
    if (compression_ == run_lengths_8 || compression_ == run_lengths_4) {
      read_runs(pixels);
      return;
    }
    const size_t width = static_cast<size_t>(header_.width), height = static_cast<size_t>(header_.height);
    const size_t stride = (width * bits_ + 31) / 32 * 4;
    const size_t row_bytes = (width * packed_bits() + 7) / 8;
    if (row_bytes > stride) refuse_damaged("its rows are shorter than its width");
    for (size_t y = 0; y < height; ++y) {
      const Bytes row = file_.part(pixels_at_ + y * stride, row_bytes);
      unpack(row.data(), row_at(pixels, y));
    }
  }

 private:
  uint8_t* row_at(uint8_t* pixels, size_t y) const {
    const size_t height = static_cast<size_t>(header_.height);
    const size_t stride = static_cast<size_t>(header_.width) * static_cast<size_t>(bytes_of(header_.mode));
    return pixels + (from_top_ ? y : height - 1 - y) * stride;
  }

  /// Bits of a pixel as Pillow unpacks them: greys are whole bytes, whatever the header says.
  unsigned packed_bits() const {
    if (header_.mode == PixelMode::bit) return 1;
    return header_.mode == PixelMode::grey ? 8 : bits_;
  }

  /// Returns the offset after the masks.
  size_t read_masks(size_t header_bytes, size_t behind_header) {
    const bool inside = header_bytes >= 52;
    const size_t at = inside ? file_header_bytes + 40 : behind_header;
    uint32_t masks[4] = {file_.u32(at), file_.u32(at + 4), file_.u32(at + 8), 0};
    if (header_bytes >= 56) masks[3] = file_.u32(at + 12);
    constexpr uint32_t masks_555[] = {0x7C00, 0x3E0, 0x1F}, masks_565[] = {0xF800, 0x7E0, 0x1F};
    constexpr uint32_t masks_24[] = {0xFF0000, 0xFF00, 0xFF};
    const auto are = [&](const uint32_t(&wanted)[3]) { return std::equal(wanted, wanted + 3, masks); };
    bool known = (bits_ == 24 && are(masks_24)) || (bits_ == 16 && are(masks_555));
    if (bits_ == 16 && are(masks_565)) known = wide_green_ = true;
    for (const Layout& layout : layouts_32) {
      if (bits_ != 32 || !std::equal(masks, masks + 4, layout.masks)) continue;
      known = true;
      order_ = layout.order;
      if (order_.find('A') != order_.npos) header_.mode = PixelMode::rgba;
      break;
    }
    if (!known) refuse_damaged("its masks are none that are in use");
    return inside ? behind_header : at + 12;
  }

  /// Pillow turns a palette that maps indexes to the same greys, or to black and white, into mode L or 1.
  void read_palette(Bytes colours, size_t count, size_t colour_bytes) {
    bool grey = count <= 256;
    for (size_t i = 0; i < std::min<size_t>(count, 256); ++i) {
      const uint8_t* colour = colours.data() + i * colour_bytes;
      const size_t expected = count == 2 && i == 1 ? 255 : i;
      for (size_t c = 0; c < 3; ++c) grey = grey && colour[c] == expected;
      header_.palette[i] = {colour[2], colour[1], colour[0], 255};
    }
    header_.mode = !grey ? PixelMode::palette : count <= 2 ? PixelMode::bit : PixelMode::grey;
    const bool runs = compression_ == run_lengths_8 || compression_ == run_lengths_4;
    if (runs && header_.mode == PixelMode::bit) refuse_damaged("its run lengths have two colours");
  }

  void unpack(const uint8_t* row, uint8_t* out) const {
    const size_t width = static_cast<size_t>(header_.width);
    switch (packed_bits()) {
      case 1: {
        const uint8_t scale = header_.mode == PixelMode::bit ? 255 : 1;
        for (size_t x = 0; x < width; ++x) out[x] = static_cast<uint8_t>((row[x / 8] >> (7 - x % 8) & 1) * scale);
        return;
      }
      case 4:
        for (size_t x = 0; x < width; ++x) out[x] = x % 2 == 0 ? row[x / 2] >> 4 : row[x / 2] & 15;
        return;
      case 8: std::memcpy(out, row, width); return;
      case 16:
        for (size_t x = 0; x < width; ++x, out += 3) unpack_16(static_cast<unsigned>(row[2 * x] | row[2 * x + 1] << 8), out);
        return;
      case 24:
        for (size_t x = 0; x < width; ++x) {
          for (size_t c = 0; c < 3; ++c) out[3 * x + c] = row[3 * x + 2 - c];
        }
        return;
      default: unpack_32(row, out);
    }
  }

  void unpack_16(unsigned pixel, uint8_t* out) const {
    const unsigned green = wide_green_ ? (pixel >> 5 & 63) * 255 / 63 : (pixel >> 5 & 31) * 255 / 31;
    out[0] = static_cast<uint8_t>((pixel >> (wide_green_ ? 11 : 10) & 31) * 255 / 31);
    out[1] = static_cast<uint8_t>(green);
    out[2] = static_cast<uint8_t>((pixel & 31) * 255 / 31);
  }

  void unpack_32(const uint8_t* row, uint8_t* out) const {
    const size_t channels = static_cast<size_t>(bytes_of(header_.mode));
    size_t places[4];
    for (size_t c = 0; c < channels; ++c) places[c] = order_.find("RGBA"[c]);
    for (size_t x = 0; x < static_cast<size_t>(header_.width); ++x) {
      for (size_t c = 0; c < channels; ++c) *out++ = row[4 * x + places[c]];
    }
  }

  /// Run-length encoding: pairs of a count and a colour; count 0 marks the end of a row or of the picture, a jump, or
  /// literal colours.
  void read_runs(uint8_t* pixels) const {
    const size_t width = static_cast<size_t>(header_.width);
    const size_t area = static_cast<size_t>(header_.area());
    const bool halves = compression_ == run_lengths_4;
    const auto indexes = make_pixels(header_.area());
    size_t count = 0;
    size_t x = 0;
    const auto put = [&](uint8_t index) {
      if (count < area) indexes[count++] = index;
    };
    size_t at = pixels_at_;
    while (count < area && at + 2 <= file_.size()) {
      const uint8_t length = file_.part(at, 2)[0], value = file_.part(at, 2)[1];
      at += 2;
      if (length > 0) {
        const size_t run = std::min<size_t>(length, width - std::min(x, width));
        for (size_t i = 0; i < run; ++i) put(!halves ? value : i % 2 == 0 ? value >> 4 : value & 15);
        x += run;
      } else if (value == 0) {
        while (count % width != 0) put(0);
        x = 0;
      } else if (value == 1) {
        break;
      } else if (value == 2) {
        const Bytes leap = file_.part(at, 2);
        at += 2;
        for (size_t i = 0; i < leap[0] + leap[1] * width; ++i) put(0);
        x = count % width;
      } else {
        const size_t plain = std::min<size_t>(area - count, value);
        const Bytes colours = file_.part(at, halves ? (plain + 1) / 2 : plain);
        for (size_t i = 0; i < plain; ++i) {
          put(!halves ? colours[i] : i % 2 == 0 ? colours[i / 2] >> 4 : colours[i / 2] & 15);
        }
        x += value;
        at += colours.size();
        at += at % 2;
      }
    }
    if (count < area) refuse_cut_off();
    for (size_t y = 0; y < area / width; ++y) std::memcpy(row_at(pixels, y), indexes.get() + y * width, width);
  }

  Numbers file_;
  uint32_t bits_ = 0;
  uint32_t compression_ = uncompressed;
  bool from_top_ = false;
  bool wide_green_ = false;
  std::string_view order_ = "BGRX";
  size_t pixels_at_ = 0;
};

}  // namespace

std::unique_ptr<ImageFile> open_bmp(Bytes bytes) { return std::make_unique<BmpFile>(bytes); }

}  // namespace mimo
