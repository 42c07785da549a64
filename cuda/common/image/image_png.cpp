// PNG files: chunks, filters and interlacing implemented here, inflated by libdeflate, which takes half of zlib's time
// and never writes more than the header announces. Chunks that do not affect pixels (text, colour profiles) are never
// inflated. Debian's static libpng is not position independent and cannot be linked into a shared library.
#include <libdeflate.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "image_file.h"

namespace mimo {
namespace {

constexpr size_t signature_bytes = 8;
/// Length and name precede a chunk's data, the checksum follows it.
constexpr size_t chunk_head = 8;
constexpr size_t chunk_tail = 4;
/// Colour types.
constexpr int grey_only = 0, rgb_only = 2, indexed = 3, grey_alpha = 4, rgb_alpha = 6;
/// Maximum expansion of deflate: 258 bytes from two bits.
constexpr size_t most_inflation = 1032;

uint32_t read_u32(const uint8_t* at) {
  return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | uint32_t{at[3]};
}

struct Chunk {
  std::string_view name;
  Bytes data;
  /// Including length, name and checksum.
  Bytes whole;
};

/// The chunk at an offset of the file. The last IDAT chunk may be truncated: the picture can be complete nevertheless.
Chunk chunk_at(Bytes file, size_t at) {
  if (file.size() - at < chunk_head) refuse_cut_off();
  const size_t length = read_u32(file.data() + at);
  const std::string_view name(reinterpret_cast<const char*>(file.data()) + at + 4, 4);
  const auto in_names = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  };
  if (!std::all_of(name.begin(), name.end(), in_names)) refuse_damaged("one of its parts has no name");
  const Bytes rest = file.subspan(at + chunk_head);
  if (rest.size() >= length + chunk_tail) {
    return {name, rest.first(length), file.subspan(at, chunk_head + length + chunk_tail)};
  }
  if (name != "IDAT") refuse_cut_off();
  return {name, rest.first(std::min(length, rest.size())), file.subspan(at)};
}

/// Adam7 passes: first column and row, and the steps between columns and rows.
struct Pass {
  int column, row, column_step, row_step;
};
constexpr Pass interlaced_passes[] = {{0, 0, 8, 8}, {4, 0, 8, 8}, {0, 4, 4, 8}, {2, 0, 4, 4},
                                      {0, 2, 2, 4}, {1, 0, 2, 2}, {0, 1, 1, 2}};
constexpr Pass whole_pass[] = {{0, 0, 1, 1}};

/// Paeth predictor: whichever of left, above and upper left is nearest to left + above - upper left.
uint8_t paeth(int left, int above, int corner) {
  const int to_left = std::abs(above - corner);
  const int to_above = std::abs(left - corner);
  const int to_corner = std::abs(left + above - 2 * corner);
  const int vertical = to_above <= to_corner ? above : corner;
  return static_cast<uint8_t>(to_left <= to_above && to_left <= to_corner ? left : vertical);
}

/// Reverses a row's filter in place. `step`: bytes of a pixel, at least one; `above`: the previous row, or zeros.
template <size_t step>
void unfilter(int filter, uint8_t* row, const uint8_t* above, size_t size) {
  switch (filter) {
    case 0: return;
    case 1:
      for (size_t i = step; i < size; ++i) row[i] = static_cast<uint8_t>(row[i] + row[i - step]);
      return;
    case 2:
      for (size_t i = 0; i < size; ++i) row[i] = static_cast<uint8_t>(row[i] + above[i]);
      return;
    case 3:
      for (size_t i = 0; i < std::min(step, size); ++i) row[i] = static_cast<uint8_t>(row[i] + above[i] / 2);
      for (size_t i = step; i < size; ++i) row[i] = static_cast<uint8_t>(row[i] + (row[i - step] + above[i]) / 2);
      return;
    case 4:
      for (size_t i = 0; i < std::min(step, size); ++i) row[i] = static_cast<uint8_t>(row[i] + above[i]);
      for (size_t i = step; i < size; ++i) {
        row[i] = static_cast<uint8_t>(row[i] + paeth(row[i - step], above[i], above[i - step]));
      }
      return;
    default: refuse_damaged("a row has filter " + std::to_string(filter));
  }
}

using Unfilter = void (*)(int, uint8_t*, const uint8_t*, size_t);

Unfilter unfilter_of(size_t step) {
  switch (step) {
    case 2: return unfilter<2>;
    case 3: return unfilter<3>;
    case 4: return unfilter<4>;
    case 6: return unfilter<6>;
    case 8: return unfilter<8>;
    default: return unfilter<1>;
  }
}

class PngFile final : public ImageFile {
 public:
  explicit PngFile(Bytes file) : ImageFile(ImageFormat::png, PixelMode::rgb) {
    size_t at = signature_bytes;
    Chunk chunk = chunk_at(file, at);
    if (chunk.name != "IHDR" || chunk.data.size() != 13) refuse_damaged("it does not begin with its header");
    read_header(chunk);
    while (chunk.name != "IDAT") {
      if (chunk.name == "IEND") refuse_damaged("it has no picture");
      if (chunk.name == "PLTE") read_palette(chunk.data);
      if (chunk.name == "tRNS") read_transparency(chunk.data);
      check(chunk);
      at += chunk.whole.size();
      chunk = chunk_at(file, at);
    }
    picture_ = file.subspan(at);
  }

  int64_t working_bytes() const override { return static_cast<int64_t>(filtered_bytes() + picture_.size()); }

  void read(uint8_t* pixels) override {
    const auto filtered = inflate();
    const size_t pixel = static_cast<size_t>(bytes_of(header_.mode));
    const Unfilter unfilter = unfilter_of(std::max<size_t>(1, sample_bits() / 8));
    std::vector<uint8_t> unpacked(interlaced_ ? static_cast<size_t>(header_.width) * pixel : 0);
    uint8_t* row = filtered.get();
    for (const Pass& pass : passes()) {
      const size_t columns = columns_of(pass);
      const size_t size = row_bytes(columns);
      if (columns == 0) continue;
      const std::vector<uint8_t> zeros(size);
      const uint8_t* above = zeros.data();
      for (int y = pass.row; y < header_.height; y += pass.row_step, row += 1 + size) {
        unfilter(row[0], row + 1, above, size);
        above = row + 1;
        uint8_t* out = pixels + static_cast<size_t>(y) * static_cast<size_t>(header_.width) * pixel;
        if (!interlaced_) {
          unpack(row + 1, columns, out);
          continue;
        }
        unpack(row + 1, columns, unpacked.data());
        out += static_cast<size_t>(pass.column) * pixel;
        for (size_t x = 0; x < columns; ++x) {
          std::memcpy(out + x * static_cast<size_t>(pass.column_step) * pixel, unpacked.data() + x * pixel, pixel);
        }
      }
    }
  }

 private:
  void read_header(const Chunk& chunk) {
    const uint8_t* data = chunk.data.data();
    depth_ = data[8];
    colour_type_ = data[9];
    if (data[11] != 0) refuse_damaged("its filters are of an unknown kind");
    interlaced_ = data[12] != 0;
    switch (colour_type_) {
      case grey_only:
        header_.mode = depth_ == 1 ? PixelMode::bit : depth_ == 16 ? PixelMode::grey16 : PixelMode::grey;
        header_.channels = 1;
        break;
      case indexed:
        header_.mode = PixelMode::palette;
        header_.channels = 1;
        break;
      case rgb_only: header_.channels = 3; break;
      case grey_alpha:
        header_.mode = PixelMode::rgba;
        header_.channels = 2;
        break;
      case rgb_alpha:
        header_.mode = PixelMode::rgba;
        header_.channels = 4;
        break;
      default: refuse_damaged("its colour type is " + std::to_string(colour_type_));
    }
    const bool small = depth_ == 1 || depth_ == 2 || depth_ == 4;
    const bool grey = colour_type_ == grey_only;
    const bool palette = colour_type_ == indexed;
    if (depth_ != 8 && !(depth_ == 16 && !palette) && !(small && (grey || palette))) {
      refuse_damaged("its samples have " + std::to_string(depth_) + " bits");
    }
    set_size(read_u32(data), read_u32(data + 4));
  }

  void read_palette(Bytes colours) {
    for (size_t i = 0; i < std::min<size_t>(256, colours.size() / 3); ++i) {
      std::memcpy(header_.palette[i].data(), colours.data() + 3 * i, 3);
    }
  }

  void read_transparency(Bytes data) {
    if (header_.mode == PixelMode::palette) {
      for (size_t i = 0; i < std::min<size_t>(256, data.size()); ++i) header_.palette[i][3] = data[i];
      return;
    }
    if (header_.mode == PixelMode::rgba) return;
    const size_t samples = header_.mode == PixelMode::rgb ? 3 : 1;
    if (data.size() < 2 * samples) refuse_damaged("its transparent colour is cut off");
    header_.has_transparent_colour = true;
    for (size_t i = 0; i < 3; ++i) {
      // Pillow compares the low byte with 8-bit samples.
      header_.transparent_colour[i] = data[samples == 3 ? 2 * i + 1 : 1];
    }
    if (header_.mode == PixelMode::bit) {
      header_.transparent_colour.fill(data[0] != 0 || data[1] != 0 ? 255 : 0);
    }
  }

  /// Pillow verifies the checksums of chunks before the picture, not of the picture's.
  static void check(const Chunk& chunk) {
    const uint8_t* begin = chunk.whole.data() + 4;
    const uint32_t found = libdeflate_crc32(0, begin, 4 + chunk.data.size());
    if (found != read_u32(begin + 4 + chunk.data.size())) {
      refuse_damaged("the checksum of its part " + std::string(chunk.name) + " is wrong");
    }
  }

  std::span<const Pass> passes() const {
    if (interlaced_) return interlaced_passes;
    return whole_pass;
  }

  size_t columns_of(const Pass& pass) const { return steps(header_.width, pass.column, pass.column_step); }
  size_t rows_of(const Pass& pass) const { return steps(header_.height, pass.row, pass.row_step); }
  static size_t steps(int end, int first, int step) {
    return end <= first ? 0 : static_cast<size_t>((end - first + step - 1) / step);
  }

  /// Bits of a pixel in the file.
  size_t sample_bits() const { return static_cast<size_t>(header_.channels * depth_); }
  size_t row_bytes(size_t columns) const { return (columns * sample_bits() + 7) / 8; }

  /// Bytes of the inflated picture: rows, each preceded by its filter type.
  size_t filtered_bytes() const {
    size_t bytes = 0;
    for (const Pass& pass : passes()) {
      if (columns_of(pass) > 0) bytes += rows_of(pass) * (1 + row_bytes(columns_of(pass)));
    }
    return bytes;
  }

  /// Concatenates the picture's IDAT chunks, which are consecutive.
  std::vector<uint8_t> packed_picture() const {
    std::vector<uint8_t> packed;
    for (size_t at = 0; picture_.size() - at >= chunk_head;) {
      // Pillow ignores data after the picture.
      if (std::memcmp(picture_.data() + at + 4, "IDAT", 4) != 0) break;
      const Chunk chunk = chunk_at(picture_, at);
      packed.insert(packed.end(), chunk.data.begin(), chunk.data.end());
      at += chunk.whole.size();
    }
    return packed;
  }

  std::unique_ptr<uint8_t[]> inflate() const {
    const size_t size = filtered_bytes();
    const std::vector<uint8_t> packed = packed_picture();
    // Two bytes of zlib header precede the data; the checksum after it may be missing.
    if (packed.size() < 2 || size / most_inflation > packed.size()) refuse_cut_off();
    const unsigned head = unsigned{packed[0]} << 8 | packed[1];
    if ((packed[0] & 15) != 8 || head % 31 != 0 || (packed[1] & 32) != 0) refuse_damaged("its picture is no zlib stream");
    struct Free {
      void operator()(libdeflate_decompressor* one) const { libdeflate_free_decompressor(one); }
    };
    const std::unique_ptr<libdeflate_decompressor, Free> decompressor(libdeflate_alloc_decompressor());
    if (!decompressor) throw std::bad_alloc();
    auto filtered = make_pixels(static_cast<int64_t>(size));
    const Bytes data = Bytes(packed).subspan(2);
    size_t taken = 0;
    size_t inflated = 0;
    switch (libdeflate_deflate_decompress_ex(decompressor.get(), data.data(), data.size(), filtered.get(), size, &taken,
                                             &inflated)) {
      case LIBDEFLATE_SUCCESS: break;
      case LIBDEFLATE_INSUFFICIENT_SPACE: refuse_damaged("its picture has more rows than its header says");
      default: refuse_damaged("its picture is cut off or cannot be inflated");
    }
    if (inflated < size) refuse_cut_off();
    const Bytes sum = data.subspan(taken);
    if (sum.size() >= 4 && libdeflate_adler32(1, filtered.get(), size) != read_u32(sum.data())) {
      refuse_damaged("the sum of its picture is wrong");
    }
    return filtered;
  }

  /// Converts a row's samples to pixels of header_.mode.
  void unpack(const uint8_t* row, size_t columns, uint8_t* out) const {
    if (depth_ < 8) {
      const unsigned most = (1u << depth_) - 1;
      const unsigned scale = header_.mode == PixelMode::palette ? 1 : 255 / most;
      for (size_t x = 0; x < columns; ++x) {
        const size_t bit = x * static_cast<size_t>(depth_);
        out[x] = static_cast<uint8_t>((row[bit / 8] >> (8 - depth_ - static_cast<int>(bit % 8)) & most) * scale);
      }
    } else if (header_.mode == PixelMode::grey16) {
      for (size_t x = 0; x < columns; ++x) {
        const auto value = static_cast<uint16_t>(row[2 * x] << 8 | row[2 * x + 1]);
        std::memcpy(out + 2 * x, &value, 2);
      }
    } else if (header_.channels == 2) {
      const size_t bytes = static_cast<size_t>(depth_) / 8;
      for (size_t x = 0; x < columns; ++x, row += 2 * bytes, out += 4) {
        out[0] = out[1] = out[2] = row[0];
        out[3] = row[bytes];
      }
    } else if (depth_ == 16) {
      // The high byte of each sample.
      for (size_t i = 0; i < columns * static_cast<size_t>(header_.channels); ++i) out[i] = row[2 * i];
    } else {
      std::memcpy(out, row, row_bytes(columns));
    }
  }

  int depth_ = 0;
  int colour_type_ = 0;
  bool interlaced_ = false;
  /// The file from the first IDAT chunk on.
  Bytes picture_;
};

}  // namespace

std::unique_ptr<ImageFile> open_png(Bytes bytes) { return std::make_unique<PngFile>(bytes); }

}  // namespace mimo
