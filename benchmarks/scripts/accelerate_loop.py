"""Accelerate with its DeepSpeed plugin, as in its examples (nlp/by_feature/deepspeed_with_config_support)."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--plugin", action="store_true", help="make the plugin here rather than by accelerate launch")
    parser.add_argument("--json", help="what the plugin reads")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--micro", type=int, default=4)
    args = parser.parse_args()
    plugin = None
    if args.plugin and args.json:
        plugin = DeepSpeedPlugin(hf_ds_config=args.json)
    elif args.plugin:
        offload = "cpu" if args.offload else "none"
        sizes = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
        plugin = DeepSpeedPlugin(zero_stage=args.stage, offload_optimizer_device=offload, **sizes)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, deepspeed_plugin=plugin)
    set_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with accelerator.main_process_first():
        rows = [tokenizer(f"number {i} " * (5 + i % 7)) for i in range(300)]

    def collate(batch):
        out = tokenizer.pad(batch, padding="longest", return_tensors="pt")
        out["labels"] = out["input_ids"].masked_fill(out["attention_mask"] == 0, -100)
        return out

    loader = DataLoader(rows, batch_size=args.micro, shuffle=True, collate_fn=collate, num_workers=2)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=100)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(args.epochs):
        model.train()
        total = 0
        for step, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses = accelerator.gather_for_metrics(loss.repeat(args.micro))
            accelerator.print(
                f"step {step} loss {losses.mean().item():.4f} of {len(losses)}, {batch['input_ids'].shape}"
            )
        accelerator.print("epoch", epoch, total.item() / len(loader))
    accelerator.wait_for_everyone()
    accelerator.save_state("checkpoint")


if __name__ == "__main__":
    main()
