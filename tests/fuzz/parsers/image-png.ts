import { imageParser } from "../image-target.ts";

export default imageParser("PNG");
