# SPDX-License-Identifier: Apache-2.0
"""pvrd as a resource of a Kubernetes node: a device plugin of kubelet's. docs/kubernetes.md. Needs
the extra `kubernetes` (grpcio, protobuf) and xdg-dbus-proxy."""
