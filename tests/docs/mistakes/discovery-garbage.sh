#!/bin/sh
echo "hosts: node1, node2"
