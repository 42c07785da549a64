/** Generated from cuda/include/mimo/images.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const ImageDecoding = { energon: 0, transformers: 1 } as const;
export type ImageDecodingName = keyof typeof ImageDecoding;

export const functions = {
	mimo_image_memory: { args: ["i64"], returns: "i32" },
	mimo_image_inspect: { args: ["ptr", "i64", "ptr"], returns: "i32" },
	mimo_image_decode: { args: ["ptr", "i64", "i32", "ptr", "i64"], returns: "i32" },
	mimo_image_decode_resized: { args: ["ptr", "i64", "i32", "ptr", "i32", "ptr", "i64"], returns: "i32" },
	mimo_image_decode_patches: { args: ["ptr", "i64", "i32", "i32", "i32", "ptr", "ptr"], returns: "i32" },
	mimo_image_resize: { args: ["ptr", "i32", "i32", "i32", "ptr", "i32", "i32"], returns: "i32" },
	mimo_image_normalize: { args: ["ptr", "i32", "i32", "i32", "ptr", "ptr"], returns: "i32" },
} as const;
