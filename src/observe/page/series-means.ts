import type { Series } from "../series.ts";

type Bins = Series["bins"];

const of = (bins: Bins): number =>
	bins.reduce((sum, bin) => sum + bin.sum, 0) / bins.reduce((sum, bin) => sum + bin.count, 0);

/** NaN of nothing. */
export const meanOf = ({ bins }: Series): number => of(bins);

/** Mean of the last bins: the present value of a curve. */
export const recentOf = (series: Series | undefined): number => of(series?.bins.slice(-8) ?? []);
