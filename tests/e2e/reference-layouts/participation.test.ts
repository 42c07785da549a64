/** `mimo parity` on processes: references in which encoder ranks have no image in a step. */
import { agreesOnProcesses } from "./agreement.ts";

agreesOnProcesses("mimo-participation-exact", {
	quick: ["4+dp2ep2", "dp2|pp2"],
	more: ["1", "tp2dp2+tp2dp2ep4", "1+1", "dp2+dp2ep2", "1+dp2ep2", "1+pp2", "tp2+pp2", "dp4|tp2dp2ep2"],
});
agreesOnProcesses("mimo-participation-corrected", {
	quick: ["dp2+pp2dp2ep2"],
	more: ["dp2+dp2ep2", "tp2dp2+dp2ep2", "dp2+tp2dp2ep2", "dp2tp2|pp2dp2ep2"],
});
