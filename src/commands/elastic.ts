/** `mimo elastic …`: commands for submodels of a parent, one file each, imported when they run. */
import { defineCommand } from "citty";

export default defineCommand({
	meta: { name: "elastic", description: "Rank, list and extract submodels of a trained parent." },
	subCommands: {
		rank: () => import("./elastic/rank.ts").then((module) => module.default),
		list: () => import("./elastic/list.ts").then((module) => module.default),
		extract: () => import("./elastic/extract.ts").then((module) => module.default),
	},
});
