// GIF files through giflib: the first image on its canvas, as Pillow shows it.
#include <gif_lib.h>

#include <algorithm>
#include <cstring>

#include "image_file.h"

namespace mimo {
namespace {

struct Source {
  Bytes left;
  /// The last block's terminator may be missing: a complete picture is accepted.
  bool ended;
};

int read_source(GifFileType* gif, GifByteType* to, int count) {
  auto& source = *static_cast<Source*>(gif->UserData);
  const size_t taken = std::min(static_cast<size_t>(count), source.left.size());
  std::memcpy(to, source.left.data(), taken);
  source.left = source.left.subspan(taken);
  if (taken > 0 || source.ended || count != 1) return static_cast<int>(taken);
  source.ended = true;
  *to = 0;
  return 1;
}

class GifFile final : public ImageFile {
 public:
  explicit GifFile(Bytes bytes) : ImageFile(ImageFormat::gif, PixelMode::grey), source_{bytes, false} {
    int error = 0;
    gif_.reset(DGifOpen(&source_, read_source, &error));
    if (!gif_) refuse_damaged(reason_of(error));
    find_picture();
    const ColorMapObject* colours = gif_->Image.ColorMap != nullptr ? gif_->Image.ColorMap : gif_->SColorMap;
    if (colours != nullptr && !only_indexes(*colours)) set_palette(*colours);
    if (header_.mode == PixelMode::grey && transparent_ >= 0) {
      header_.has_transparent_colour = true;
      header_.transparent_colour.fill(static_cast<uint8_t>(transparent_));
    }
    header_.channels = 1;
    const GifImageDesc& picture = gif_->Image;
    set_size(std::max(gif_->SWidth, picture.Left + picture.Width),
             std::max(gif_->SHeight, picture.Top + picture.Height));
  }

  int64_t working_bytes() const override { return 0; }

  void read(uint8_t* pixels) override {
    std::memset(pixels, transparent_ >= 0 ? transparent_ : 0, static_cast<size_t>(header_.bytes()));
    const GifImageDesc& picture = gif_->Image;
    if (!picture.Interlace) {
      read_rows(pixels, 0, 1);
      return;
    }
    read_rows(pixels, 0, 8);
    read_rows(pixels, 4, 8);
    read_rows(pixels, 2, 4);
    read_rows(pixels, 1, 2);
  }

 private:
  static std::string reason_of(int error) {
    const char* reason = GifErrorString(error);
    return reason == nullptr ? "unknown" : reason;
  }

  void require(int outcome) const {
    if (outcome == GIF_OK) return;
    if (source_.left.empty()) refuse_cut_off();
    refuse_damaged(reason_of(gif_->Error));
  }

  /// Advances to the first image, reading the extensions before it.
  void find_picture() {
    for (;;) {
      GifRecordType record;
      require(DGifGetRecordType(gif_.get(), &record));
      if (record == IMAGE_DESC_RECORD_TYPE) {
        require(DGifGetImageDesc(gif_.get()));
        return;
      }
      if (record != EXTENSION_RECORD_TYPE) refuse_damaged("it has no picture");
      int code = 0;
      GifByteType* block = nullptr;
      require(DGifGetExtension(gif_.get(), &code, &block));
      // Block layout: length, flags, two bytes of delay, the transparent index.
      const bool has_transparent = block != nullptr && block[0] >= 4 && (block[1] & 1) != 0;
      if (code == GRAPHICS_EXT_FUNC_CODE && has_transparent) transparent_ = block[4];
      while (block != nullptr) require(DGifGetExtensionNext(gif_.get(), &block));
    }
  }

  /// Whether every colour of a palette is the grey of its index: Pillow gives such images mode L.
  static bool only_indexes(const ColorMapObject& colours) {
    for (int i = 0; i < colours.ColorCount; ++i) {
      const GifColorType& colour = colours.Colors[i];
      if (colour.Red != i || colour.Green != i || colour.Blue != i) return false;
    }
    return true;
  }

  void set_palette(const ColorMapObject& colours) {
    header_.mode = PixelMode::palette;
    for (int i = 0; i < std::min(256, colours.ColorCount); ++i) {
      const GifColorType& colour = colours.Colors[i];
      header_.palette[static_cast<size_t>(i)] = {colour.Red, colour.Green, colour.Blue, 255};
    }
    if (transparent_ >= 0) header_.palette[static_cast<size_t>(transparent_)][3] = 0;
  }

  void read_rows(uint8_t* pixels, int first, int step) {
    const GifImageDesc& picture = gif_->Image;
    for (int y = first; y < picture.Height; y += step) {
      uint8_t* row = pixels + int64_t{picture.Top + y} * header_.width + picture.Left;
      require(DGifGetLine(gif_.get(), row, picture.Width));
    }
  }

  struct Close {
    void operator()(GifFileType* gif) const { DGifCloseFile(gif, nullptr); }
  };

  Source source_;
  std::unique_ptr<GifFileType, Close> gif_;
  int transparent_ = -1;
};

}  // namespace

std::unique_ptr<ImageFile> open_gif(Bytes bytes) { return std::make_unique<GifFile>(bytes); }

}  // namespace mimo
