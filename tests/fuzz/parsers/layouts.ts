import { namedTopology, parseLayouts } from "../../../src/parallel/layout.ts";
import { UserError } from "../../../src/system/errors.ts";
import type { FuzzParser } from "../parser.ts";

/** As verify does, which makes no process before the layout fits the model. */
const mostRanks = 1024;

export default {
	about: "layouts such as tp2dp2+tp2dp2ep2etp1, and their grids",
	open: () => ({
		seeds: ["1, 1+1,tp2+tp2ep2", "tp2dp2+tp2dp2ep2etp2", "dp3+1"].map((text) => Buffer.from(text)),
		dictionary: ["tp", "dp", "ep", "etp", "pp", "cp", "+", ",", " ", "0", "99999999999999999999", "4294967296"],
		parse: (bytes) => {
			for (const layout of parseLayouts(new TextDecoder().decode(bytes))) {
				const { tensor, data } = layout.language;
				if (tensor * data <= mostRanks) namedTopology(layout);
			}
		},
		refuses: (error) => error instanceof UserError,
	}),
} satisfies FuzzParser;
