/** `mimo elastic …`: the commands about submodels of a parent. Each is a file of its own, loaded when it runs. */
import { defineCommand } from "citty";

export default defineCommand({
	meta: { name: "elastic", description: "Submodels of one trained parent: rank units, list, extract." },
	subCommands: {
		rank: () => import("./elastic/rank.ts").then((module) => module.default),
		list: () => import("./elastic/list.ts").then((module) => module.default),
		extract: () => import("./elastic/extract.ts").then((module) => module.default),
	},
});
