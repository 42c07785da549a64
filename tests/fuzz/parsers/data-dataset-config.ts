import { defaultLoadOptions, loadDatasets } from "../../../src/data/energon/dataset.ts";
import { crude, DataSet, folder, meta, typed } from "../data-set.ts";
import type { FuzzParser } from "../parser.ts";

export default {
	about: "dataset.yaml of a data set",
	open: () => {
		const set = new DataSet();
		return {
			seeds: [typed, crude].map((text) => Buffer.from(text)),
			dictionary: [
				"sample_loader: a.py:f\n",
				"parallel_shard_iters: 1e9\n",
				"max_samples_per_sequence: 0\n",
				"[",
				"null",
				"__class__: ",
			],
			parse: (bytes) => {
				set.put(`${meta}/dataset.yaml`, bytes);
				loadDatasets(set.storage, folder, null, defaultLoadOptions);
			},
		};
	},
} satisfies FuzzParser;
