import { flatten } from "../../../src/data/energon/format/flatten.ts";
import { readMetadataset } from "../../../src/data/energon/format/metadataset.ts";
import { DataSet } from "../data-set.ts";
import { type FuzzParser, inputName } from "../parser.ts";

const version2 = "__class__: MetadatasetV2\nsplits:\n  train:\n";
const inherited = { splitPart: "train", subflavors: {}, multiplier: 1, subset: null };

export default {
	about: "metadatasets: blends, subsets, joins, of both versions",
	open: () => {
		const set = new DataSet();
		const path = `${inputName}.yaml`;
		const joiner = "    joiner:\n      __module__: megatron.energon\n      __class__: TextSample\n";
		return {
			seeds: [
				`${version2}    path: ${inputName}\n    subset: {range: [0%, 50%]}\n`,
				`${version2}    blend:\n    - path: ${inputName}\n      weight: 3\n    - {path: ${inputName}, split_part: val}\n`,
				`${version2}    blend_epochized:\n    - path: ${inputName}\n      repetitions: 1.5\n      subflavors:\n        a: b\n`,
				`${version2}    join:\n    - path: ${inputName}\n    - path: ${inputName}\n      nonmatch: skip\n${joiner}`,
				`splits:\n  train:\n    datasets:\n    - path: ${inputName}\n      subflavor: x\n`,
			].map((text) => Buffer.from(text)),
			dictionary: [
				"1e999",
				"-1",
				".nan",
				"[0, end]",
				`path: ${path}\n`,
				"aux: {a: b}\n",
				"&a ",
				"*a",
				"shuffle_over_epochs_multiplier: -1\n",
			],
			parse: (bytes) => {
				set.put(path, bytes);
				flatten(readMetadataset(set.storage, path), inherited);
			},
		};
	},
} satisfies FuzzParser;
