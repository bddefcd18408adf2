"""torchvision's detection reference: boxes that are chosen by their values."""

import torch
from torchvision.models.detection import fasterrcnn_resnet50_fpn

model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    images = [torch.randn(3, 200, 200).cuda() for _ in range(2)]
    boxes = torch.tensor([[10.0, 10.0, 60.0, 60.0]]).cuda()
    targets = [{"boxes": boxes, "labels": torch.tensor([1]).cuda()} for _ in images]
    loss = sum(model(images, targets).values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
