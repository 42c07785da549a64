/** `mimo parity` on processes: references in which encoder ranks have no image in a step. */
import { agreesOnProcesses, staged } from "./agreement.ts";

agreesOnProcesses("mimo-participation-exact", [
	...[null, "1", "1+1", "dp2+dp2ep2", "1+dp2ep2", "4+dp2ep2", "tp2dp2+tp2dp2ep4"],
	...staged,
]);
agreesOnProcesses("mimo-participation-corrected", [
	...[null, "dp2+dp2ep2", "tp2dp2+dp2ep2", "dp2+tp2dp2ep2"],
	...["dp2+pp2dp2ep2", "dp2tp2|pp2dp2ep2"],
]);
