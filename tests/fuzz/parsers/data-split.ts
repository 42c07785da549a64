import { DataSet, meta, refusesSample, split } from "../data-set.ts";
import type { FuzzParser } from "../parser.ts";

export default {
	about: "split.yaml of a data set, its patterns expanded",
	open: () => {
		const set = new DataSet();
		return {
			seeds: [Buffer.from(split)],
			json: false,
			dictionary: ["{0..999999999}", "{a,b}", "{000..9..0}", "&a ", "*a", "exclude:", "!!set ", "null", "0.tar/c"],
			parse: (bytes) => {
				set.put(`${meta}/split.yaml`, bytes);
				set.read();
			},
			refuses: refusesSample,
		};
	},
} satisfies FuzzParser;
