import { DataSet, info, meta, refusesSample } from "../data-set.ts";
import type { FuzzParser } from "../parser.ts";

export default {
	about: ".info.json of a data set",
	open: () => {
		const set = new DataSet();
		return {
			seeds: [Buffer.from(info)],
			json: true,
			dictionary: ["9007199254740993", "1e999", "0.tar", "__proto__", "-1"],
			parse: (bytes) => {
				set.put(`${meta}/.info.json`, bytes);
				set.read();
			},
			refuses: refusesSample,
		};
	},
} satisfies FuzzParser;
