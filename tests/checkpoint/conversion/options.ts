/** Default options of a conversion. */
import type { ConversionOptions } from "../../../src/checkpoint/conversion/convert.ts";
import { canonicalLayout } from "../../../src/checkpoint/native/manifest.ts";

type Change = Partial<ConversionOptions> & Pick<ConversionOptions, "from" | "to" | "source" | "target">;

export function conversionOptions(change: Change): ConversionOptions {
	return {
		force: false,
		staging: null,
		optimizer: true,
		allowFallback: false,
		visionHeads: null,
		newLayers: { seed: 1234, sizes: {} },
		pattern: null,
		inert: [],
		dtype: null,
		names: null,
		reference: null,
		layout: canonicalLayout,
		layerNames: null,
		wrapper: null,
		paddedVocabularySize: null,
		adapters: null,
		shardBytes: 5e9,
		drop: [],
		generator: "test",
		...change,
	};
}
