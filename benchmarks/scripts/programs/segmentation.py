"""torchvision's segmentation reference: two losses, its confusion matrix, and an evaluation."""

import torch
from torch import nn
from torchvision.models.segmentation import deeplabv3_resnet50

CLASSES = 21


def criterion(outputs, target):
    losses = {name: nn.functional.cross_entropy(x, target, ignore_index=255) for name, x in outputs.items()}
    return losses["out"] + 0.5 * losses["aux"]


model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
matrix = torch.zeros((CLASSES, CLASSES), dtype=torch.int64, device="cuda")
for step in range(5):
    images = torch.randn(2, 3, 96, 96).cuda()
    target = torch.randint(0, CLASSES, (2, 96, 96)).cuda()
    outputs = model(images)
    loss = criterion(outputs, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.inference_mode():
        found = outputs["out"].argmax(1).flatten()
        known = (target.flatten() >= 0) & (target.flatten() < CLASSES)
        places = CLASSES * target.flatten()[known].to(torch.int64) + found[known]
        matrix += torch.bincount(places, minlength=CLASSES**2).reshape(CLASSES, CLASSES)
    print(step, loss.item(), matrix.diag().sum().item())
