import { expect, test } from "bun:test";
import { configurationOf } from "../../../src/config/resolve.ts";
import { fields } from "../../../src/config/schema.ts";
import { encoderConfig } from "../../../src/models/vision/from-configuration.ts";
import { projectorParameters } from "../../../src/models/vision/projector.ts";
import { vitParameters } from "../../../src/models/vit/names.ts";
import { elementCount } from "../../../src/tensor/tensor.ts";

const keys = {
	...configurationOf({ preset: "nemotron-tiny" }),
	bf16: true,
	classTokenLen: 8,
	disableVisionClassToken: true,
	hiddenSize: 2688,
	hybridLayerPattern: "M*E-M*E-M*E-M*E-M*E-",
	initMethodStd: 0.0173,
	loraAlpha: 32,
	loraDropout: 0,
	loraRank: null,
	loraTargetModules: [],
	normEpsilon: 1e-5,
	patchDim: 16,
	pixelShuffle: true,
	// Sizes by default: those of upstream's model provider.
	visionNumLayers: fields["vision-num-layers"].default!,
	visionHiddenSize: fields["vision-hidden-size"].default!,
	visionNumAttentionHeads: fields["vision-num-attention-heads"].default!,
	visionMaxImgH: fields["vision-max-img-h"].default!,
	visionMaxImgW: fields["vision-max-img-w"].default!,
	visionActivation: "gelu-tanh",
	visionClassTokenPositions: false,
	deepstackVisualIndexes: null,
	visionLayerScale: null,
	visionRotaryBase: null,
	visionTemporalPatchSize: 1,
	visionNormEpsilon: fields["vision-norm-epsilon"].default!,
	visionPatchBias: false,
	visionKvChannels: 80,
	visionFfnHiddenSize: 5120,
	visionFinalLayernorm: true,
	visionPositionCrop: true,
	visionPositionMode: "cpe",
	visionProjectionFfnHiddenSize: 20480,
	visionProjectionActivation: "squared-relu",
	visionProjectionBias: false,
	visionProjectionNorm: false,
	visionProjectionNormalization: "RMSNorm",
	visionProjectionType: "affine",
} as const;

test("RADIO ViT-H has the parameters the specification counts", () => {
	const count = (specs: readonly { shape: readonly number[] }[]) =>
		specs.reduce((sum, { shape }) => sum + elementCount(shape), 0);
	const { tower, projector } = encoderConfig(keys);
	expect(count(vitParameters(tower))).toBe(651_645_440);
	expect(count(vitParameters({ ...tower, classTokens: 10 }))).toBe(651_648_000);
	expect(count(vitParameters({ ...tower, finalLayerNorm: false }))).toBe(651_645_440 - 2560);
	expect(count(projectorParameters(projector, "radio_encoder"))).toBe(13_762_560);
	const mlp = encoderConfig({ ...keys, visionProjectionType: "mlp" }).projector;
	expect(count(projectorParameters(mlp, "radio_encoder"))).toBe(159_907_840);
	expect(count(projectorParameters({ ...mlp, normEpsilon: 1e-5 }, "radio_encoder"))).toBe(159_907_840 + 5120);
	const normed = encoderConfig({ ...keys, visionProjectionType: "mlp", visionProjectionNorm: true }).projector;
	expect(normed).toEqual({ ...mlp, normEpsilon: 1e-5 });
	expect(tower.activation).toBe("geluTanh");
	expect(encoderConfig({ ...keys, visionActivation: "gelu" }).tower.activation).toBe("geluErf");
	expect(tower.outputInitMethodStd).toBeCloseTo(0.0173 / Math.sqrt(20), 12);
});
