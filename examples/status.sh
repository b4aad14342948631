#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Reads pvrd's state from a shell. busctl cannot pass file descriptors, so text and pictures go through pvrctl.
#
#     status.sh [ADDRESS]            (without an address: the system bus)
set -eu
address=${1:-${PVRD_BUS:-system}}
case $address in
system) bus=--system ;;
user) bus=--user ;;
*) bus=--address=$address ;;
esac
name=org.pvrd.Pvrd1
path=/org/pvrd/Pvrd1

echo "state:"
busctl "$bus" get-property $name $path $name.Manager Version State Reason
echo "models:"
busctl "$bus" --json=short call $name $path $name.Manager ListModels
echo "statistics:"
busctl "$bus" --json=short call $name $path $name.Manager GetStatistics
echo "text:"
pvrctl --bus "$address" generate -n 8 --temp 0 "Say hello."
