/** The encoder, its pictures and its projector. */
import { type Draw, type Flags, on } from "../draw.ts";

export function drawVision(draw: Draw): Flags {
	const patch = draw.one([4, 8]);
	const side = () => String(patch * 2 * draw.whole(1, 2));
	return {
		"model-provider": "nemotron-moe-vlm",
		"image-token-id": draw.one(["63", "5"]),
		"vision-num-layers": draw.one(["1", "2"]),
		"vision-hidden-size": draw.one(["16", "24"]),
		"vision-num-attention-heads": draw.one(["2", "4"]),
		"vision-ffn-hidden-size": draw.one(["16", "48"]),
		...draw.sometimes(0.3, () => ({ "vision-kv-channels": draw.one(["4", "12"]) })),
		"vision-max-img-h": String(patch * draw.whole(4, 8)),
		"vision-max-img-w": String(patch * draw.whole(4, 8)),
		"vision-position-mode": draw.one(["cpe", "cpe", "direct", "window"]),
		...draw.sometimes(0.5, () => ({ "vision-position-crop": "false" })),
		...draw.sometimes(0.3, () => ({ "vision-final-layernorm": "false" })),
		"vision-activation": draw.one(["gelu-tanh", "gelu"]),
		"class-token-len": draw.one(["0", "1", "4"]),
		"patch-dim": String(patch),
		"img-h": side(),
		"img-w": side(),
		...draw.one<Flags>([
			{},
			{ "disable-vision-class-token": on },
			{ "pixel-shuffle": on, "disable-vision-class-token": on },
		]),
		...draw.sometimes(0.5, () => ({ "dynamic-resolution": on })),
		...draw.one<Flags>([
			{},
			{ "vision-projection-type": "mlp", "vision-projection-ffn-hidden-size": "24" },
			{ "vision-projection-type": "mlp", "vision-projection-norm": on },
		]),
		...draw.sometimes(0.15, () => ({ "freeze-vit": on })),
		...draw.sometimes(0.15, () => ({ "freeze-projection": on })),
		...draw.sometimes(0.1, () => ({ "freeze-lm": on })),
		"encoder-balance": draw.one(["cost", "number"]),
		...draw.sometimes(0.1, () => ({ "encoder-grad-participation": "corrected" })),
	};
}

export const hasEncoder = (flags: Flags): boolean => flags["model-provider"] === "nemotron-moe-vlm";
