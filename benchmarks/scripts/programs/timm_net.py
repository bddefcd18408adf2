"""What timm's train.py uses: mixup, an averaged model, its scaler, optimizers and accuracy."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, NativeScaler, accuracy

model = timm.create_model("resnet18", num_classes=10).cuda()
average, scaler = ModelEmaV3(model), NativeScaler()
optimizer = create_optimizer_v2(model, "lamb", lr=1e-3)
mixup, loss_of = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10), SoftTargetCrossEntropy()
for step in range(5):
    images, labels = torch.randn(8, 3, 64, 64).cuda(), torch.randint(0, 10, (8,)).cuda()
    mixed, targets = mixup(images, labels)
    with torch.autocast("cuda"):
        out = model(mixed)
        loss = loss_of(out, targets)
    scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    optimizer.zero_grad()
    average.update(model, step=step)
    accuracy(out, labels, topk=(1, 5))
