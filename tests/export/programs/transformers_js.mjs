// node transformers_js.mjs FOLDER DTYPE IMAGE TEXT...: token ids and vectors of transformers.js as JSON.
import { createRequire } from 'node:module';
import path from 'node:path';
import { pathToFileURL } from 'node:url';

const installed = createRequire(path.resolve(process.env.NODE_FOLDER, 'package.json'));
const { AutoTokenizer, AutoImageProcessor, CLIPTextModelWithProjection, CLIPVisionModelWithProjection, RawImage, env } =
  await import(pathToFileURL(installed.resolve('@huggingface/transformers')));
const [folder, dtype, image, ...texts] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = path.dirname(path.resolve(folder)) + '/';
const name = path.basename(folder);

const tokenizer = await AutoTokenizer.from_pretrained(name);
const textModel = await CLIPTextModelWithProjection.from_pretrained(name, { dtype });
const inputs = tokenizer(texts, { padding: true, truncation: true });
const { text_embeds } = await textModel(inputs);

const processor = await AutoImageProcessor.from_pretrained(name);
const visionModel = await CLIPVisionModelWithProjection.from_pretrained(name, { dtype });
const { image_embeds } = await visionModel(await processor(await RawImage.read(image)));

const ids = inputs.input_ids.tolist().map((row) => row.map(Number));
console.log(JSON.stringify({ ids, text: text_embeds.tolist(), image: image_embeds.tolist()[0] }));
